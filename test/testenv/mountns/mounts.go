package mountns

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
)

// Below lists the mount points at and below dir in the order in which they were
// mounted. A place with several mounts is listed as often.
func Below(dir string) ([]string, error) {
	file, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("list mounts: %w", err)
	}
	defer file.Close()
	return below(dir, file)
}

// mountPoint is the field of that name in a line of proc_pid_mountinfo(5).
const mountPoint = 4

func below(dir string, mountinfo io.Reader) ([]string, error) {
	var found []string
	lines := bufio.NewScanner(mountinfo)
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) <= mountPoint {
			return nil, fmt.Errorf("list mounts: cannot read the line %q", lines.Text())
		}
		path := unescape(fields[mountPoint])
		if path == dir || strings.HasPrefix(path, strings.TrimSuffix(dir, "/")+"/") {
			found = append(found, path)
		}
	}
	return found, lines.Err()
}

// unescape undoes the kernel's \ooo for blanks, line ends and backslashes.
func unescape(path string) string {
	var b strings.Builder
	for i := 0; i < len(path); i++ {
		if path[i] == '\\' && i+3 < len(path) {
			if code, err := strconv.ParseUint(path[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(code))
				i += 3
				continue
			}
		}
		b.WriteByte(path[i])
	}
	return b.String()
}
