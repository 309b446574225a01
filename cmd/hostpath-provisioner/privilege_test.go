package main

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/privilege"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/provisioner"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// migrationVariable makes this program the migration of one volume, with the capabilities that it lists.
const migrationVariable = "PROVISIONER_TEST_MIGRATION"

// A handing is who hands a volume over, and where.
type handing struct {
	Path         string
	Capabilities []privilege.Capability
}

// move hands pvc-1 over to the pool of the driver, as the migration does.
func move(encoded string) error {
	var m handing
	if err := json.Unmarshal([]byte(encoded), &m); err != nil {
		return err
	}
	if _, err := privilege.Keep(m.Capabilities); err != nil {
		return err
	}
	h := store.Handover{
		From: store.VolumePath{Directory: m.Path, Name: "pvc-1"},
		To:   store.VolumePath{Directory: filepath.Join(m.Path, provisioner.CSIDirectory), Name: "pvc-1"},
	}
	if err := h.Check(); err != nil {
		return err
	}
	return errors.Join(h.Move(), h.Record(0))
}

// Not to label, nor to erase: the container of the migration has one capability.
func TestMigration_needsOneCapability(t *testing.T) {
	if testenv.Guest() {
		t.Skip("make test has this")
	}
	testenv.NeedRoot(t)
	const user = 1000
	for _, capabilities := range [][]privilege.Capability{{privilege.DACOverride}, nil} {
		path := t.TempDir()
		serve(t, filepath.Join(path, provisioner.CSIDirectory))
		_, err := create(t.Context(), serve(t, path), "pvc-1")
		must.Succeed(t, err)
		// To move a directory to another parent changes it, too.
		directory := filepath.Join(path, "pvc-1")
		must.Succeed(t, os.Chown(directory, user, user), os.Chmod(directory, 0))
		encoded, err := json.Marshal(handing{path, capabilities})
		must.Succeed(t, err)
		cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
		cmd.Env = append(os.Environ(), migrationVariable+"="+string(encoded))
		if out, err := cmd.CombinedOutput(); (err == nil) != (len(capabilities) == 1) {
			t.Errorf("with %v: %v, %s", capabilities, err, out)
		}
	}
}
