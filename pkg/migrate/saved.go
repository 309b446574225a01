package migrate

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/provisioner/origin"
)

const (
	savedVersion = 1
	savedSuffix  = ".json"
	lockName     = "lock"
	// maxSaved bounds what is read of a file, in bytes: the API server takes objects of up to 3 MiB.
	maxSaved = 8 << 20
)

// A saved is the file of one volume: what its objects were, and what they become. Its name is the uid of the old claim.
type saved struct {
	Version int       `json:"version"`
	Saved   time.Time `json:"saved"`
	// Finished says that everything was done, so that objects which are missing were deleted later.
	Finished bool             `json:"finished"`
	From     store.VolumePath `json:"from"`
	To       store.VolumePath `json:"to"`
	// Recorded: the directory had a record when it was found.
	Recorded bool `json:"recorded"`
	// Bytes is the size of the new volume.
	Bytes  int64                         `json:"bytes"`
	Class  string                        `json:"class"`
	Driver string                        `json:"driver"`
	Volume *corev1.PersistentVolume      `json:"persistentVolume"`
	Claim  *corev1.PersistentVolumeClaim `json:"persistentVolumeClaim"`

	directory string
	onDisk    bool
	// kept: it has what others have changed of the objects since it was written.
	kept bool
	// missing is why there is no claim to save; nil if there is one.
	missing error
}

func (s *saved) name() string { return string(s.Claim.UID) + savedSuffix }

func (s *saved) file() string { return filepath.Join(s.directory, s.name()) }

func (s *saved) claimName() types.NamespacedName {
	return types.NamespacedName{Namespace: s.Volume.Spec.ClaimRef.Namespace, Name: s.Volume.Spec.ClaimRef.Name}
}

// handover is the way to a form.
func (s *saved) handover(want form) store.Handover {
	h := store.Handover{From: s.From, To: s.To}
	if want == plain {
		return h.Reverse()
	}
	return h
}

// SavedFiles are the files of the volumes.
type savedFiles struct {
	path string
	dir  *dir.Dir // nil if there is no such directory yet
}

// openFiles opens the directory of the files, to change them if writable is set. Only one process at a time does.
func openFiles(path string, writable bool) (f savedFiles, unlock func(), err error) {
	f.path = path
	if writable {
		if err := os.MkdirAll(path, 0o700); err != nil {
			return f, nil, err
		}
	}
	d, err := dir.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return f, func() {}, nil
	}
	if err != nil {
		return f, nil, err
	}
	f.dir = d
	closeDir := func() { _ = d.Close() } // every file in it was synced
	if !writable {
		return f, closeDir, nil
	}
	release, err := dir.TryLockByte(d, lockName, 0)
	if err != nil {
		closeDir()
		return f, nil, fmt.Errorf("another migration runs on this node: %w", err)
	}
	return f, func() { release(); closeDir() }, nil
}

func (f savedFiles) load() (all []*saved, err error) {
	if f.dir == nil {
		return nil, nil
	}
	for entry, err := range f.dir.Entries() {
		if err != nil {
			return nil, err
		}
		if _, is := dir.Temporary(entry.Name); is || !strings.HasSuffix(entry.Name, savedSuffix) {
			continue
		}
		data, err := f.dir.ReadFile(entry.Name, maxSaved)
		if err != nil {
			return nil, err
		}
		s := &saved{directory: f.path, onDisk: true}
		if err := json.Unmarshal(data, s); err != nil {
			return nil, fmt.Errorf("%s/%s: %w", f.path, entry.Name, err)
		}
		if s.Version != savedVersion || s.Volume == nil || s.Volume.Spec.ClaimRef == nil || s.Claim == nil || s.name() != entry.Name {
			return nil, fmt.Errorf("%s/%s is not a file of this program, or of another version of it", f.path, entry.Name)
		}
		all = append(all, s)
	}
	slices.SortFunc(all, func(a, b *saved) int { return strings.Compare(a.claimName().String(), b.claimName().String()) })
	return all, nil
}

func (f savedFiles) write(s *saved) error {
	data, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return err
	}
	s.onDisk, s.kept = true, false
	return f.dir.WriteFile(s.name(), append(data, '\n'))
}

// writeKept writes what others have changed, before objects are replaced that have it.
func (f savedFiles) writeKept(s *saved) error {
	if !s.kept || !s.onDisk {
		return nil
	}
	return f.write(s)
}

func (f savedFiles) remove(s *saved) error {
	s.onDisk = false
	return errors.Join(f.dir.Remove(s.name()), f.dir.Sync())
}

// newSaved is the file of a volume whose migration has not begun. What is missing is found by check.
func (m *migration) newSaved(pv *corev1.PersistentVolume, claim *corev1.PersistentVolumeClaim) *saved {
	pv.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "PersistentVolume"}
	claim.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "PersistentVolumeClaim"}
	pv.ManagedFields, claim.ManagedFields = nil, nil
	from := origin.Path(pv)
	s := &saved{
		Version: savedVersion, Saved: time.Now().UTC().Truncate(time.Second),
		From:  store.VolumePath{Directory: filepath.Dir(from), Name: filepath.Base(from)},
		Class: m.Class, Driver: m.target.driver, Volume: pv, Claim: claim, directory: m.Directory,
	}
	s.To = store.VolumePath{Directory: m.target.pool.Path, Name: handle(pv)}
	return s
}
