package crash

import (
	"embed"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/trap"
)

var update = flag.Bool("update", false, "write testdata/steps from what the driver does now")

// The guest of test/cmd/kernel has no files next to the program.
//
//go:embed testdata/steps
var testdata embed.FS

// A golden is what the driver is known to do, in order, in each call and each start on one kind of pool. The files are
// in testdata/steps: a heading for each sequence, and a step on each line.
type golden struct {
	path string
	want map[string]string
	got  map[string]string
	keys []string // of got, in order
	// complete: all that is known was to be seen, unless there was a step less, another process having left a device as it
	// has to be.
	complete, fewer bool
	// calls: all sequences but those after a kill were to be seen.
	calls    bool
	problems []string
}

func openGolden(t *testing.T, name string) *golden {
	t.Helper()
	g := &golden{
		path: filepath.Join("testdata", "steps", strings.ReplaceAll(name, " ", "-")+".txt"),
		want: make(map[string]string),
		got:  make(map[string]string),
	}
	if *update {
		if testenv.Guest() {
			g.path = filepath.Join("/out", filepath.Base(g.path))
		}
		return g
	}
	text, err := testdata.ReadFile(g.path)
	must.Succeed(t, err)
	for section := range strings.SplitSeq(strings.TrimPrefix(string(text), "# "), "\n# ") {
		heading, steps, _ := strings.Cut(section, "\n")
		for _, key := range keysOf(heading) {
			g.want[key] = strings.TrimSpace(steps)
		}
	}
	return g
}

// unknown is a golden of which nothing is known: no sequence is compared.
func unknown() *golden { return &golden{} }

// after is the key of the start after a call, or a start, that was killed when it had taken so many steps.
func after(name string, steps int) string { return fmt.Sprintf("start after %s %d", name, steps) }

// keysOf are those of sequences that are the same: a heading ends in all their numbers.
func keysOf(heading string) (keys []string) {
	name, numbers, several := strings.Cut(heading, ", killed after steps ")
	if !several {
		return []string{heading}
	}
	for n := range strings.SplitSeq(numbers, " ") {
		keys = append(keys, name+" "+n)
	}
	return keys
}

// compare expects a sequence to be the known one, if it has a key.
func (g *golden) compare(key string, steps []string) {
	if key == "" || g.path == "" {
		return
	}
	got := strings.Join(withoutOrder(steps), "\n")
	first, seen := g.got[key]
	if !seen {
		g.got[key] = got
		g.keys = append(g.keys, key)
	}
	switch want, known := g.want[key]; {
	case *update && (!seen || same(first, got)):
	case *update:
		g.problem("%s: differs from the first time (-first +now):\n%s", key, cmp.Diff(first, got))
	case !known:
		g.problem("%s: unknown, got:\n%s", key, got)
	case !same(want, got):
		g.problem("%s: (-want +got):\n%s", key, cmp.Diff(want, got))
	}
}

func (g *golden) problem(format string, args ...any) {
	g.problems = append(g.problems, fmt.Sprintf(format, args...))
}

// close reports what differs, or writes the file.
func (g *golden) close(t testing.TB) {
	t.Helper()
	if g.path == "" {
		return
	}
	if *update && g.complete && !t.Failed() {
		must.Succeed(t, os.MkdirAll(filepath.Dir(g.path), 0o755))
		must.Succeed(t, os.WriteFile(g.path, []byte(g.text()), 0o644)) //nolint:gosec // a source file
	}
	for key := range g.want {
		expected := g.complete && !g.fewer || g.calls && !strings.HasPrefix(key, "start after ")
		if _, seen := g.got[key]; expected && !seen {
			g.problem("%s: does not happen", key)
		}
	}
	if len(g.problems) > 0 {
		t.Errorf("%s; go test ./test/e2e/crash -update would write it anew:\n%s", g.path, strings.Join(g.problems, "\n"))
	}
}

func (g *golden) text() string {
	var text strings.Builder
	for i := 0; i < len(g.keys); {
		same := i + 1
		name, number, several := cutNumber(g.keys[i])
		for several && same < len(g.keys) && g.got[g.keys[same]] == g.got[g.keys[i]] {
			next, n, _ := cutNumber(g.keys[same])
			if next != name {
				break
			}
			number += " " + n
			same++
		}
		if several {
			name += ", killed after steps " + number
		}
		fmt.Fprintf(&text, "# %s\n%s\n\n", name, g.got[g.keys[i]])
		i = same
	}
	return strings.ReplaceAll(text.String(), "\n\n\n", "\n\n")
}

func cutNumber(key string) (name, number string, ok bool) {
	space := strings.LastIndexByte(key, ' ')
	if !strings.HasPrefix(key, "start after ") {
		return key, "", false
	}
	return key[:space], key[space+1:], true
}

// differing is what differs from run to run: names that are made at random, what a creation had taken when it was killed, and the
// numbers of devices.
var differing = []struct {
	what *regexp.Regexp
	with string
}{
	{regexp.MustCompile(`(/trash/[^/]+/[^/]+)\.[a-z2-7]{16}\+[0-9]+\b`), "$1.RANDOM+BYTES"},
	{regexp.MustCompile(`/loop[0-9]+`), "/loopN"},
	{regexp.MustCompile(`/\.clone-[A-Z2-7]+`), "/.clone-RANDOM"},
	{regexp.MustCompile(`/#[0-9]+ \(deleted\)`), "/UNNAMED"},
}

const (
	findDevice   = "ioctl 0x4c82 /dev/loop-control" // LOOP_CTL_GET_FREE
	takeDevice   = "ioctl 0x4c0a /dev/loopN"        // LOOP_CONFIGURE
	clearDevice  = "ioctl 0x4c01 /dev/loopN"        // LOOP_CLR_FD
	removeDevice = "ioctl 0x4c81 /dev/loop-control" // LOOP_CTL_REMOVE
	askMounts    = "open_tree ?"                    // at the start, whether it may
	setDiscard   = "write /sys/devices/virtual/block/loopN/queue/discard_max_bytes"
	destroyGroup = "ioctl 0x4010942a POOL" // BTRFS_IOC_QGROUP_CREATE, which destroys too
)

// stable are steps in words that are the same in each run. The socket is made while pools are opened. Another process can take
// a device between the step that finds one free and the step that takes it, and one that has it open for an instant has it cleared
// again. A signal interrupts fallocate(2), which goes on.
func (w *world) stable(steps []trap.Step) (all []string) {
	for s := range strings.SplitSeq(w.words(steps), "\n") {
		for _, d := range differing {
			s = d.what.ReplaceAllString(s, d.with)
		}
		again := len(all) > 0 && s == all[len(all)-1] && (s == clearDevice || strings.HasPrefix(s, "fallocate"))
		if s == "" || again || s == askMounts || strings.HasSuffix(s, "/csi.sock") {
			continue
		}
		if n := len(all); s == findDevice && n > 1 && all[n-1] == takeDevice && all[n-2] == findDevice {
			all = all[:n-2]
		}
		all = append(all, s)
	}
	return all
}

// optional are steps that depend on what others did. A free device may have the limit of discards that it has to have: else it is
// set, and the device removed afterwards. A qgroup goes when the kernel has removed its subvolume, at the next start if need be.
var optional = strings.NewReplacer("\n"+setDiscard, "", "\n"+removeDevice, "", "\n"+destroyGroup, "")

// probes are what a check of the pool does, every 10 seconds: the call that it falls into has them too.
var probes = []string{"fsync POOL", "utimensat OWN/trash/" + drivertest.NodeName}

func isProbe(step string) bool { return slices.Contains(probes, step) }

// probesIn counts what may be of a check.
func probesIn(steps []string) (n int) {
	for _, s := range steps {
		if isProbe(s) {
			n++
		}
	}
	return n
}

// same reports whether steps are the known ones, but for what is optional and the probes of checks.
func same(known, now string) bool {
	want := strings.Split(optional.Replace("\n"+known), "\n")
	for step := range strings.SplitSeq(optional.Replace("\n"+now), "\n") {
		switch {
		case len(want) > 0 && want[0] == step:
			want = want[1:]
		case !isProbe(step):
			return false
		}
	}
	return len(want) == 0
}

func TestSame_checkOrReaperFallsIntoCall(t *testing.T) {
	const known = "ioctl 0x4c01 /dev/loopN\nunlinkat OWN/published/node/pvc-victim"
	for now, want := range map[string]bool{
		known: true,
		"ioctl 0x4c01 /dev/loopN\nfsync POOL\nutimensat OWN/trash/node\nunlinkat OWN/published/node/pvc-victim": true,
		"ioctl 0x4c01 /dev/loopN\nfsync OWN/volumes\nunlinkat OWN/published/node/pvc-victim":                    false,
		"ioctl 0x4c01 /dev/loopN":         false,
		destroyGroup + "\n" + known:       true,
		known + "\n" + destroyGroup:       true,
		"ioctl 0x8030942b POOL\n" + known: false,
	} {
		if got := same(known, now); got != want {
			t.Errorf("steps %q are the known ones is %v, want %v", now, got, want)
		}
	}
}

func TestKeyAfterKill_checkFallsIntoCall(t *testing.T) {
	w := &world{
		Driver: &drivertest.Driver{Client: drivertest.Client{Targets: "/targets"}},
		pool:   &drivertest.Pool{PoolConfig: drivertest.PoolConfig{Path: "/pool"}},
		learnt: []trap.Step{"mkdirat /pool/a", "fallocate /pool/a", "fsync /pool/a", "renameat /pool/a", "fsync /pool"},
	}
	for name, test := range map[string]struct {
		steps []trap.Step
		want  string
	}{
		"none":                 {w.learnt[:4], "start after call 3"},
		"all":                  {w.learnt, "start after call 4"},
		"a check before":       {[]trap.Step{"mkdirat /pool/a", "fsync /pool", "fallocate /pool/a", "fsync /pool/a"}, ""},
		"a check at the kill":  {[]trap.Step{"mkdirat /pool/a", "fallocate /pool/a", "fsync /pool"}, "start after call 2"},
		"an interrupted step":  {[]trap.Step{"mkdirat /pool/a", "fallocate /pool/a", "fallocate /pool/a"}, ""},
		"more than was learnt": {append(slices.Clone(w.learnt), "fsync /pool", "unlinkat /pool/b"), ""},
	} {
		if got := w.keyAfter("call", test.steps); got != test.want {
			t.Errorf("%s: the key is %q, want %q", name, got, test.want)
		}
	}
}

// inTrash is what is removed of a volume.
var inTrash = regexp.MustCompile(`^unlinkat (OWN/trash/[^/]+/[^/]+)/`)

// withoutOrder are steps without the order in which a directory lists what is in it, which is a filesystem's own.
func withoutOrder(steps []string) (all []string) {
	for _, s := range steps {
		if m := inTrash.FindStringSubmatch(s); m != nil {
			s = "unlinkat " + m[1] + "/..."
		}
		all = append(all, s)
	}
	return slices.CompactFunc(all, func(a, b string) bool { return a == b && strings.HasSuffix(a, "/...") })
}
