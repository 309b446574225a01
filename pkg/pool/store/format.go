package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"syscall"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// OwnName is the directory of a pool that belongs to the driver.
const OwnName = ".hostpath-provisioner"

// The names of the layout, all in OwnName. That is no volume id: it does not start with a letter or digit.
const (
	formatName   = "format"
	volumesName  = "volumes"
	creatingName = "creating"
	trashName    = "trash"
	// snapshotsName has the snapshots. It is made with the first.
	snapshotsName = "snapshots"
	lockName      = "lock"
	// coveredName is an empty file in a pool that another filesystem was mounted over.
	coveredName = "covered"
	// publishedName has what each node of a shared pool has published, as empty files
	// published/<node>/<volume id>: a kernel knows only its own mounts, and a volume that is
	// in use on any node must not be removed.
	publishedName = "published"

	formatVersion = 1
	maxFormat     = 4 << 10 // bytes
)

// A Format says what layout a pool has, and which pool it is.
type Format struct {
	Version int    `json:"version"`
	UUID    string `json:"uuid"`
	// Foreign is what others had taken when the pool was made, in bytes.
	Foreign int64     `json:"foreignBytes"`
	Created time.Time `json:"created"`
	// Shared is what the configuration said of the pool when it was made: whether its nodes leave marks and locks for each other.
	// It stays so: a node to which it is otherwise would see neither. Nil if an earlier driver made it.
	Shared *bool `json:"shared,omitempty"`
}

// Agrees refuses a configuration that says otherwise than the format whether the pool is shared.
func (f *Format) Agrees(shared bool) error {
	if f.Shared == nil || *f.Shared == shared {
		return nil
	}
	return fmt.Errorf("its %s/%s says that shared is %t, and its configuration that it is %t: correct the configuration; "+
		"to change the pool, first end all pods with volumes of it, and its drivers on all nodes", OwnName, formatName, *f.Shared, shared)
}

// readFormat returns nil where there is none. It refuses a layout that this
// driver does not know, before anything is changed in it.
func readFormat(own *dir.Dir) (*Format, error) {
	data, err := own.ReadFile(formatName, maxFormat)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	f, err := decodeFormat(data)
	if err != nil {
		return nil, fmt.Errorf("%s/%s %w", own, formatName, err)
	}
	return f, nil
}

// decodeFormat checks all that later code relies on.
func decodeFormat(data []byte) (*Format, error) {
	unreadable := func(err error) (*Format, error) {
		return nil, fmt.Errorf("is unreadable, restore it from a backup or remove it: %w", err)
	}
	version, err := versionOf(data)
	if err != nil {
		return unreadable(err)
	}
	if version != formatVersion {
		return nil, fmt.Errorf("has version %d, this driver knows version %d: use the driver that wrote it", version, formatVersion)
	}
	var f Format
	if err := json.Unmarshal(data, &f); err != nil {
		return unreadable(err)
	}
	if f.UUID == "" {
		return unreadable(errors.New("it has no uuid"))
	}
	if f.Foreign < 0 || f.Foreign > volume.MaxBytes {
		return unreadable(fmt.Errorf("it has %d foreign bytes", f.Foreign))
	}
	return &f, nil
}

// versionOf reads nothing but the version: what else there is, a newer version may have
// of other types.
func versionOf(data []byte) (int, error) {
	var doc struct {
		Version int `json:"version"`
	}
	err := json.Unmarshal(data, &doc)
	return doc.Version, err
}

func ensureFormat(ctx context.Context, root, own *dir.Dir, shared bool) (*Format, error) {
	f, err := readFormat(own)
	if err == nil && f == nil {
		f, err = makeFormat(ctx, root, own, shared)
	}
	if err == nil && f.Shared == nil {
		f, err = f.complete(own, shared)
	}
	if err != nil {
		return nil, err
	}
	return f, f.Agrees(shared)
}

func makeFormat(ctx context.Context, root, own *dir.Dir, shared bool) (*Format, error) {
	// The nodes of a shared pool may all be the first.
	unlock, err := dir.Lock(ctx, own, lockName)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if f, err := readFormat(own); err != nil || f != nil {
		return f, err
	}
	space, err := dir.SpaceOf(root)
	if err != nil {
		return nil, err
	}
	f := &Format{Version: formatVersion, UUID: RandomSuffix(), Foreign: space.TakenBytes(), Created: time.Now().UTC().Truncate(time.Second), Shared: &shared}
	if err := f.write(own); err != nil {
		return nil, err
	}
	return f, root.Sync()
}

// complete has the format of an earlier driver say whether the pool is shared. Where that cannot be written, the pool is served all the
// same. Of two nodes that write differently in one moment, one finds the other's with its next check.
func (f *Format) complete(own *dir.Dir, shared bool) (*Format, error) {
	whole := *f
	whole.Shared = &shared
	err := whole.write(own)
	if NoRoom(err) || errors.Is(err, syscall.EROFS) {
		return f, nil
	}
	return &whole, err
}

func (f *Format) write(own *dir.Dir) error {
	data, err := f.encode()
	if err != nil {
		return err
	}
	return own.WriteFile(formatName, data)
}

// encode is the file as the driver writes it.
func (f *Format) encode() ([]byte, error) {
	data, err := json.Marshal(f)
	return append(data, '\n'), err
}
