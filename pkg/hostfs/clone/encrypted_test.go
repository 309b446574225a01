package clone_test

import (
	"os"
	"path/filepath"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone/clonetest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// A user can encrypt directories of a volume. A copy would be readable without the key, and where that is not there the names are not known.
func TestEncryptedEntriesAreRefused(t *testing.T) {
	testenv.NeedRoot(t)
	tests := map[string]struct {
		encrypted string // in the volume
		use       func(t *testing.T, in string)
	}{
		"a file":      {"secrets", func(t *testing.T, in string) { write(t, filepath.Join(in, "file"), "secret") }},
		"a directory": {"secrets", func(t *testing.T, in string) { must.Succeed(t, os.Mkdir(filepath.Join(in, "sub"), 0o700)) }},
		"a link":      {"secrets", func(t *testing.T, in string) { must.Succeed(t, os.Symlink("secret", filepath.Join(in, "link"))) }},
		"nothing yet": {"secrets", func(*testing.T, string) {}},
		"the volume":  {"", func(*testing.T, string) {}},
		"a file that was moved": {"secrets", func(t *testing.T, in string) {
			write(t, filepath.Join(in, "file"), "secret")
			must.Succeed(t, os.Link(filepath.Join(in, "file"), filepath.Join(filepath.Dir(in), "file")))
		}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			root := testenv.MadeFS(t, "ext4", 64<<20, "-O", "encrypt")
			src, dst := filepath.Join(root, "src"), filepath.Join(root, "dst")
			encrypted := filepath.Join(src, test.encrypted)
			must.Succeed(t, os.MkdirAll(encrypted, 0o755), os.Mkdir(dst, 0o700))
			takeKey := testenv.Encrypt(t, encrypted)
			test.use(t, encrypted)
			wantEncrypted := func() {
				t.Helper()
				for rounds := range 2 {
					_, err := clone.Tree(t.Context(), open(t, src), open(t, dst), clone.Options{Method: clone.Copy, Rounds: rounds})
					must.ErrorIs(t, err, clone.ErrEncrypted)
					must.Succeed(t, os.RemoveAll(dst), os.Mkdir(dst, 0o700))
				}
			}
			wantEncrypted()
			takeKey()
			wantEncrypted()
		})
	}
}

// In a pool that is encrypted itself the copy is, too.
func TestCopyInEncryptedPool(t *testing.T) {
	testenv.NeedRoot(t)
	pool := filepath.Join(testenv.MadeFS(t, "ext4", 64<<20, "-O", "encrypt"), "pool")
	src, dst := filepath.Join(pool, "src"), filepath.Join(pool, "dst")
	must.Succeed(t, os.Mkdir(pool, 0o755))
	testenv.Encrypt(t, pool)
	must.Succeed(t, os.Mkdir(src, 0o755), os.Mkdir(dst, 0o700), os.Mkdir(filepath.Join(src, "sub"), 0o700))
	write(t, filepath.Join(src, "sub", "file"), "content")
	tree(t, src, dst, clone.Options{Method: clone.Copy, Rounds: 1})
	clonetest.Same(t, src, dst)
}
