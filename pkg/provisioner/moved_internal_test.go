package provisioner

import (
	"os"
	"path/filepath"
	"testing"

	"kubevirt.io/hostpath-provisioner/test/must"
)

// An administrator has moved the data to another disk, and left a link to it, which pods follow. Without the PersistentVolume nothing would
// say any more that it is there.
func TestDeleteRefusesWhatIsNoDirectory(t *testing.T) {
	for title, replace := range map[string]func(at, elsewhere string) error{
		"a link": func(at, elsewhere string) error { return os.Symlink(elsewhere, at) },
		"a file": func(at, _ string) error { return os.WriteFile(at, nil, 0o600) },
	} {
		t.Run(title, func(t *testing.T) {
			h := newHarness(t, Config{Mode: PerNode})
			pv := own(t, h.config.Path)
			at, elsewhere := pv.Spec.HostPath.Path, filepath.Join(t.TempDir(), "moved")
			must.Succeed(t, os.Rename(at, elsewhere), replace(at, elsewhere))
			must.ErrorIs(t, h.Delete(t.Context(), pv), errNotOwn)
			for _, stays := range []string{at, elsewhere} {
				if _, err := os.Lstat(stays); err != nil {
					t.Error(err)
				}
			}
		})
	}
}
