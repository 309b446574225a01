package blockdev

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"unicode/utf16"
)

// A Kind is what the table of a disk says of a partition.
type Kind struct {
	// Type is a GUID in capital letters, or two digits in a table of DOS.
	Type string
	// Name and Attributes are of a GPT. That a partition of a table of DOS is active is an attribute too.
	Name       string
	Attributes uint64
}

// Kind reads the table of the disk that a partition is on. It is an error if that has no such partition, or one that begins
// elsewhere than where the kernel has it.
func (f Facts) Kind() (Kind, error) {
	disk, err := Inspect(f.Disk)
	if err != nil {
		return Kind{}, err
	}
	path := "/dev/" + disk.Name
	if at, err := At(path); err != nil || at != f.Disk {
		return Kind{}, fmt.Errorf("%s is not the disk of %s (%w)", path, f.Name, err)
	}
	file, err := os.Open(path)
	if err != nil {
		return Kind{}, err
	}
	defer file.Close()
	block, err := strconv.ParseInt(attribute(filepath.Join(sysfs, f.Disk.String()), "queue/logical_block_size"), 10, 64)
	if err != nil {
		return Kind{}, fmt.Errorf("block size of %s: %w", disk.Name, err)
	}
	kind, start, err := readKind(file, block, f.Partition)
	if err != nil {
		return Kind{}, fmt.Errorf("partition table of %s: %w", disk.Name, err)
	}
	// Device mapper's have no start there.
	if known := attribute(filepath.Join(sysfs, f.Number.String()), "start"); known != "" && known != strconv.FormatInt(start/sector, 10) {
		return Kind{}, fmt.Errorf("partition table of %s: partition %d begins at byte %d there, and for the kernel at sector %s", disk.Name, f.Partition, start, known)
	}
	return kind, nil
}

// readKind reads a table whose first blocks are as the UEFI specification says (5.3), with where the partition begins.
func readKind(disk io.ReaderAt, block int64, part int) (kind Kind, start int64, err error) {
	head := make([]byte, 2*block)
	if _, err := disk.ReadAt(head, 0); err != nil {
		return kind, 0, err
	}
	if header := head[block:]; string(header[:8]) == "EFI PART" {
		return readGPT(disk, header, block, part)
	}
	if head[510] != 0x55 || head[511] != 0xaa || part > 4 {
		return kind, 0, fmt.Errorf("it does not have partition %d, or not as a primary one", part)
	}
	entry := head[446+16*(part-1):][:16]
	kind = Kind{Type: fmt.Sprintf("%02X", entry[4]), Attributes: uint64(entry[0])}
	return kind, int64(binary.LittleEndian.Uint32(entry[8:])) * block, nil
}

func readGPT(disk io.ReaderAt, header []byte, block int64, part int) (kind Kind, start int64, err error) {
	first, count, size := binary.LittleEndian.Uint64(header[72:]), binary.LittleEndian.Uint32(header[80:]), binary.LittleEndian.Uint32(header[84:])
	const most = 1 << 12 // of anything there, and far from it
	if first > most || size < 128 || size > most || part < 1 || uint64(part) > uint64(min(count, most)) {
		return kind, 0, fmt.Errorf("it does not have partition %d", part)
	}
	entry := make([]byte, size)
	if _, err := disk.ReadAt(entry, int64(first)*block+int64(part-1)*int64(size)); err != nil {
		return kind, 0, err
	}
	text := make([]uint16, 36)
	for n := range text {
		text[n] = binary.LittleEndian.Uint16(entry[56+2*n:])
	}
	name, _, _ := strings.Cut(string(utf16.Decode(text)), "\x00")
	kind = Kind{Type: guid(entry), Attributes: binary.LittleEndian.Uint64(entry[48:]), Name: name}
	return kind, int64(binary.LittleEndian.Uint64(entry[32:])) * block, nil
}

// guid writes the first three fields as the numbers that they are, and the rest as bytes.
func guid(b []byte) string {
	return fmt.Sprintf("%08X-%04X-%04X-%X-%X", binary.LittleEndian.Uint32(b), binary.LittleEndian.Uint16(b[4:]), binary.LittleEndian.Uint16(b[6:]), b[8:10], b[10:16])
}

// PartitionsHeld reports whether a partition of the disk of a partition is held exclusively, which keeps the disk from being.
func (f Facts) PartitionsHeld() (bool, error) {
	disk, err := Inspect(f.Disk)
	if err != nil {
		return false, err
	}
	err = Device{"/dev/" + disk.Name, f.Disk}.CheckUnused()
	if errors.Is(err, ErrBusy) {
		return true, nil
	}
	return false, err
}
