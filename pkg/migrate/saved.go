package migrate

import (
	"context"
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

// openSaved opens the directory of the files. Only one process at a time changes anything.
func (m *migration) openSaved(ctx context.Context) (unlock func(), err error) {
	if m.Apply {
		if err := os.MkdirAll(m.Directory, 0o700); err != nil {
			return nil, err
		}
	}
	d, err := dir.Open(m.Directory)
	if errors.Is(err, fs.ErrNotExist) {
		return func() {}, nil
	}
	if err != nil {
		return nil, err
	}
	m.saved = d
	closeDir := func() { _ = d.Close() } // every file in it was synced
	if !m.Apply {
		return closeDir, nil
	}
	release, err := dir.TryLockByte(d, lockName, 0)
	if err != nil {
		closeDir()
		return nil, fmt.Errorf("another migration runs on this node: %w", err)
	}
	return func() { release(); closeDir() }, nil
}

func (m *migration) load() (all []*saved, err error) {
	if m.saved == nil {
		return nil, nil
	}
	for entry, err := range m.saved.Entries() {
		if err != nil {
			return nil, err
		}
		if _, is := dir.Temporary(entry.Name); is || !strings.HasSuffix(entry.Name, savedSuffix) {
			continue
		}
		data, err := m.saved.ReadFile(entry.Name, maxSaved)
		if err != nil {
			return nil, err
		}
		s := &saved{directory: m.Directory, onDisk: true}
		if err := json.Unmarshal(data, s); err != nil {
			return nil, fmt.Errorf("%s/%s: %w", m.Directory, entry.Name, err)
		}
		if s.Version != savedVersion || s.Volume == nil || s.Volume.Spec.ClaimRef == nil || s.Claim == nil || s.name() != entry.Name {
			return nil, fmt.Errorf("%s/%s is not a file of this program, or of another version of it", m.Directory, entry.Name)
		}
		all = append(all, s)
	}
	slices.SortFunc(all, func(a, b *saved) int { return strings.Compare(a.claimName().String(), b.claimName().String()) })
	return all, nil
}

func (m *migration) write(s *saved) error {
	data, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return err
	}
	s.onDisk = true
	return m.saved.WriteFile(s.name(), append(data, '\n'))
}

func (m *migration) remove(s *saved) error {
	s.onDisk = false
	return errors.Join(m.saved.Remove(s.name()), m.saved.Sync())
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
