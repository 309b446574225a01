package transfer_test

import (
	"os"
	"path/filepath"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/transfer"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// Without its key what a user has encrypted has other names, which would be all that is left after a move.
func TestEncryptedEntriesAreNotSent(t *testing.T) {
	testenv.NeedRoot(t)
	src := filepath.Join(testenv.MadeFS(t, "ext4", 64<<20, "-O", "encrypt"), "volume")
	secrets := filepath.Join(src, "secrets")
	must.Succeed(t, os.MkdirAll(secrets, 0o755))
	takeKey := testenv.Encrypt(t, secrets)
	must.Succeed(t, os.Mkdir(filepath.Join(secrets, "sub"), 0o755))
	wantRefused := func() {
		t.Helper()
		for _, p := range []transfer.Pass{{}, whole} {
			_, err := connect(t, t.TempDir(), transfer.Options{}).Pass(t.Context(), open(t, src), p)
			must.ErrorIs(t, err, clone.ErrEncrypted)
		}
	}
	wantRefused()
	takeKey()
	wantRefused()
}
