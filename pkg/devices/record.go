package devices

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/blockdev"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// A State is the last step of a device that was recorded.
type State string

// The states that a record has.
const (
	// Offered: it is a volume that no claim has had.
	Offered State = "offered"
	// Bound: it has the data of a claim.
	Bound State = "bound"
	// Cleaning: a claim had it, and was deleted: some of its data may have gone.
	Cleaning State = "cleaning"
	// Clean: there is no data on it.
	Clean State = "clean"
)

// A Record is what the node's disk has of a device that is or was offered, also when the API has nothing of it any more.
type Record struct {
	Version int `json:"version"`
	// Path, Bytes and Identity say which device it is. With another size or identity the record is not about the
	// device that the path leads to now.
	Path     string `json:"path"`
	Bytes    int64  `json:"bytes"`
	Identity string `json:"identity,omitempty"`
	// Alike is what a device without an identity has in common with others.
	Alike string `json:"alike,omitempty"`
	State State  `json:"state"`
	// Start is where a partition begins on its disk, in bytes, and 0 if that is not known.
	Start int64 `json:"start,omitempty"`
	// Volume and Claim are those that used it last.
	Volume    string `json:"volume,omitempty"`
	VolumeUID string `json:"volumeUID,omitempty"`
	ClaimUID  string `json:"claimUID,omitempty"`
	Claim     string `json:"claim,omitempty"`
	// Wipe is how it is or was cleaned, and empty if it never was. Done is how much of that was done when it was ended, in bytes, and Left what
	// leftAs was of the device then, or when it was clean; empty if that is not known.
	Wipe Wipe   `json:"wipe,omitempty"`
	Done int64  `json:"done,omitempty"`
	Left string `json:"left,omitempty"`
	// Instance distinguishes a disk without identity from any other, until the node is booted again.
	Instance string `json:"instance,omitempty"`

	// name is the file that it was read from, if that is not the one of its path.
	name string
}

// recordVersion changes when an older program would misread a record.
const recordVersion = 1

// maxRecord is larger than any record that we write, in bytes.
const maxRecord = 64 << 10

// Records keeps the records of a node in a directory, a file for each path.
type Records struct {
	dir *dir.Dir
	mu  sync.Mutex // of who writes
}

// OpenRecords opens the directory of the records, and makes it if it is not there.
func OpenRecords(path string) (*Records, error) {
	if err := os.MkdirAll(path, 0o700); err != nil {
		return nil, fmt.Errorf("make the directory of the records: %w", err)
	}
	d, err := dir.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open the directory of the records: %w", err)
	}
	return &Records{dir: d}, nil
}

// Close closes the directory.
func (r *Records) Close() error { return r.dir.Close() }

// lockFile is locked by the agent that works with the records.
const lockFile = "lock"

// Own waits until no other agent works with the records, and keeps others from it until released: of two agents on a node each would undo what
// the other has noted. It calls waits if it has to.
func (r *Records) Own(ctx context.Context, waits func()) (release func(), err error) {
	release, err = dir.TryLockByte(r.dir, lockFile, 0)
	if errors.Is(err, dir.ErrLocked) {
		waits()
		release, err = dir.LockByte(ctx, r.dir, lockFile, 0)
	}
	if err != nil {
		return nil, fmt.Errorf("lock the records: %w", err)
	}
	return release, nil
}

// file is that of the record of a path.
func file(path string) string { return fileAside(path, "") }

// fileAside is that of a record whose path another disk has got.
func fileAside(path, alike string) string {
	sum := sha256.Sum256([]byte(path + alike))
	name := outsideNames.ReplaceAllString(filepath.Base(path), "-")
	return name[:min(len(name), 100)] + "-" + hex.EncodeToString(sum[:8]) + ".json"
}

// Get reads the record of a path. Without one it is the zero Record. One that cannot be read is an error, and not as if
// there were none.
func (r *Records) Get(path string) (Record, error) {
	content, err := r.dir.ReadFile(file(path), maxRecord)
	if errors.Is(err, fs.ErrNotExist) {
		return Record{}, nil
	}
	var record Record
	if err == nil {
		err = json.Unmarshal(content, &record)
	}
	if err == nil && (record.Version != recordVersion || record.Path != path) {
		err = fmt.Errorf("it has version %d and is for %q", record.Version, record.Path)
	}
	if err != nil {
		return Record{}, fmt.Errorf("record of %s: %w", path, err)
	}
	if record.State == Cleaning && !record.hasData() { // by an earlier build, which cleaned what was never a volume's
		return Record{}, nil
	}
	return record, nil
}

// recordOf says which device a record is of, but for the instance.
func recordOf(path string, f blockdev.Facts) Record {
	r := Record{Version: recordVersion, Path: path, Bytes: f.SizeBytes, Identity: f.Identity, Start: f.Start}
	if f.Identity == "" {
		r.Alike = f.Alike
	}
	return r
}

// recordNow is that with the instance.
func recordNow(path string, f blockdev.Facts) (r Record, err error) {
	r = recordOf(path, f)
	if r.Identity == "" {
		r.Instance, err = f.Instance()
	}
	return r, err
}

// alike is what the device is known by, alone or with others.
func (r Record) alike() string { return cmp.Or(r.Identity, r.Alike) }

// asOf takes an identity for what it is, where an earlier build took for one what other devices may have too, as the path of a loop device's file.
func (r Record) asOf(f blockdev.Facts) Record {
	if r.Identity != "" && f.Identity == "" && r.Identity == f.Alike {
		r.Identity, r.Alike = "", r.Identity
	}
	return r
}

// looksOther says that a device is another one than that of the record, by what neither is surely known by.
func (r Record) looksOther(f blockdev.Facts) bool {
	return r.Identity == "" && f.Identity == "" && differ(r.Alike, f.Alike)
}

// isAttached says that a device is the loop device of the record, which was not detached since: its file may have grown.
func (r Record) isAttached(f blockdev.Facts) bool {
	if shared(f.Alike) {
		return false
	}
	same, err := r.isSurely(f)
	return err == nil && same
}

// hasData says that the device has, or may have, data of a claim.
func (r Record) hasData() bool { return r.State == Bound || r.State == Cleaning && r.ClaimUID != "" }

// wipeOf is how the device was cleaned, which may have grown since. What its signatures alone were taken from has the rest of the data still.
func (r Record) wipeOf(bytes int64) Wipe {
	if r.Bytes != bytes && r.Wipe != WipeSignatures {
		return ""
	}
	return r.Wipe
}

// file is where it is.
func (r Record) file() string { return cmp.Or(r.name, file(r.Path)) }

// BoundElsewhere are the records, but that of the path, which say that a disk which is known so, alone or with others, has the data of a claim, or
// a partition of it, or its disk: it may have another path after a reboot.
func (r *Records) BoundElsewhere(path, alike string) (found []Record, err error) {
	if alike == "" {
		return nil, nil
	}
	err = r.each(func(record Record) {
		if record.hasData() && sameDisk(record.alike(), alike) && record.name != file(path) {
			found = append(found, record)
		}
	})
	return found, err
}

// each reads all records. What is no record has no version, and is reported for its path.
func (r *Records) each(do func(Record)) error {
	for entry, err := range r.dir.Entries() {
		if err != nil {
			return fmt.Errorf("read the records: %w", err)
		}
		content, err := r.dir.ReadFile(entry.Name, maxRecord)
		if errors.Is(err, fs.ErrNotExist) {
			continue // it was being written, and has its name now
		}
		if err != nil {
			return fmt.Errorf("record %s: %w", entry.Name, err)
		}
		var record Record
		if json.Unmarshal(content, &record) != nil {
			if _, half := dir.Temporary(entry.Name); half || entry.Name == lockFile {
				continue
			}
			record = Record{}
		}
		record.name = entry.Name
		do(record)
	}
	return nil
}

// disks are those of records with data of claims that other nodes may see, each with the path of the device. They are not all if there is an error: a
// record that is not understood may be of any.
func (r *Records) disks() (paths map[string]string, err error) {
	paths = make(map[string]string)
	var unknown []error
	err = r.each(func(record Record) {
		if record.Version != recordVersion {
			unknown = append(unknown, fmt.Errorf("record %s is damaged, or of another version", record.name))
		} else if disk := reservable(record.alike()); disk != "" && record.hasData() {
			paths[disk] = record.Path
		}
	})
	return paths, errors.Join(append(unknown, err)...)
}

// Put writes a record: after a crash the old or the new one is there, whole. What its path had of a claim's data on another disk stays, aside.
func (r *Records) Put(record Record) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	before, err := r.Get(record.Path)
	if err != nil {
		return err
	}
	if alike := before.alike(); before.hasData() && alike != "" && alike != record.alike() {
		if err := r.write(fileAside(before.Path, alike), before); err != nil {
			return err
		}
	}
	return r.write(file(record.Path), record)
}

func (r *Records) write(name string, record Record) error {
	record.Version = recordVersion
	content, err := json.Marshal(record)
	if err != nil {
		return err
	}
	if err := r.dir.WriteFile(name, append(content, '\n')); err != nil {
		return fmt.Errorf("record of %s: %w", record.Path, err)
	}
	return nil
}

// is reports whether the record is about a device. One that has an identity may have grown.
func (r Record) is(f blockdev.Facts) bool {
	r = r.asOf(f)
	if r.State == "" || r.Identity != "" && r.Identity != f.Identity || r.looksOther(f) || r.beginsElsewhere(f) {
		return false
	}
	return r.Bytes == f.SizeBytes || r.Bytes < f.SizeBytes && (r.Identity != "" || r.isAttached(f))
}

// beginsElsewhere says that a partition is another one than that of the record, which had its number.
func (r Record) beginsElsewhere(f blockdev.Facts) bool { return r.Start != 0 && r.Start != f.Start }

// isSurely says whether the device that a record is about is that which was recorded: by its identity, or for one without any
// since the node was booted.
func (r Record) isSurely(f blockdev.Facts) (bool, error) {
	r = r.asOf(f)
	if r.Identity != "" || f.Identity != "" {
		return r.Identity == f.Identity, nil
	}
	if r.Instance == "" || r.looksOther(f) {
		return false, nil
	}
	instance, err := f.Instance()
	return r.Instance == instance, err
}

// of is the record if it is about a device for certain, and zero otherwise.
func (r Record) of(f blockdev.Facts) (Record, error) {
	if !r.is(f) {
		return Record{}, nil
	}
	if same, err := r.isSurely(f); err != nil || !same {
		return Record{}, err
	}
	return r, nil
}

// unknown says that there is no record of a volume of the device.
func (r Record) unknown() bool { return r.State == "" || r.Volume == "" }

// isOf reports whether the record may be of a volume: one that was made anew under its name is another one.
func (r Record) isOf(v Volume) bool {
	return r.unknown() || r.Volume == v.Name && !differ(r.VolumeUID, v.UID)
}

// mayBeOf reports the same of the volume of a claim too that has the name of the record's: both may have been made anew from a backup, and the claim
// that has its volume has its data.
func (r Record) mayBeOf(v Volume) bool { return r.isOf(v) || v.Used && r.Claim == v.Claim }

// isSurelyOf says that it is of a volume, and of no other that was made under its name.
func (r Record) isSurelyOf(v Volume) bool { return r.Volume == v.Name && r.VolumeUID == v.UID }

// wasCleanedFor says that the device was cleaned, or in part, for the claim of a volume that is gone when its finalizers are.
func (r Record) wasCleanedFor(v Volume) bool {
	return v.Deleted && (r.State == Clean || r.State == Cleaning) && r.isSurelyOf(v) && r.ClaimUID == v.ClaimUID
}

// agrees reports whether what the record and the API say of a released volume can both be true.
func (r Record) agrees(v Volume) bool {
	return r.unknown() || r.isOf(v) && !differ(r.ClaimUID, v.ClaimUID)
}

// differ compares what may be known.
func differ(a, b string) bool { return a != "" && b != "" && a != b }

// contradiction is the problem of a volume that a record cannot be of.
func (r Record) contradiction(v Volume) Problem {
	return Problem{v.Name, v.Path, Contradiction, fmt.Sprintf("the record %s says that it is %s, and the API says that it is %s",
		r.file(), user(r.Volume, r.VolumeUID, r.Claim, r.ClaimUID), user(v.Name, v.UID, v.Claim, v.ClaimUID))}
}

func user(volume, uid, claim, claimUID string) string {
	text := fmt.Sprintf("the PersistentVolume %s with the UID %q", volume, uid)
	if claim != "" || claimUID != "" {
		text += fmt.Sprintf(" of the claim %s with the UID %q", claim, claimUID)
	}
	return text
}
