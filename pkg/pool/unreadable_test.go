package pool_test

import (
	"cmp"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/funcr"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota/quotatest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/rotten"
)

// unreadable are entries of a pool that its disk has lost: of those that end in a slash the content, of others all but the name.
var unreadable = map[string]struct {
	broken string
	beside string // an entry that is whole
	record bool   // of pvc-old, with the uid that is in the names in the trash
	shared bool
	// says is what is logged of it; "kept" if it is empty, and "-" stands for nothing: it is another node's.
	says string
}{
	"a creation":                              {broken: own + "creating/node-1/pvc-old"},
	"the content of a creation":               {broken: own + "creating/node-1/pvc-old/"},
	"the record of a creation":                {broken: own + "volumes/pvc-old.json", record: true, beside: own + "creating/node-1/pvc-old"},
	"trash":                                   {broken: own + "trash/node-1/pvc-old.uid+1048576"},
	"the content of trash":                    {broken: own + "trash/node-1/pvc-old.uid+1048576/"},
	"trash of unknown size":                   {broken: own + "trash/node-1/pvc-old.uid"},
	"the record of trash":                     {broken: own + "volumes/pvc-old.json", record: true, beside: own + "trash/node-1/pvc-old.uid+1048576", says: "Record is unreadable"},
	"the volume of which there is trash":      {broken: "pvc-old", record: true, beside: own + "trash/node-1/pvc-old.uid+1048576"},
	"trash in place":                          {broken: ".trash-pvc-old.uid+1048576"},
	"an unfinished record":                    {broken: own + "volumes/.new-pvc-old.json"},
	"an unfinished mark":                      {broken: own + "published/node-1/.new-pvc-old"},
	"a marked volume":                         {broken: "pvc-old", beside: own + "published/node-1/pvc-old"},
	"another node's creations":                {broken: own + "creating/node-0", beside: own + "trash/node-0"},
	"the list of another node's creations":    {broken: own + "creating/node-0/", beside: own + "trash/node-0"},
	"another node's creation":                 {broken: own + "creating/node-0/pvc-old", beside: own + "trash/node-0"},
	"another node's trash":                    {broken: own + "trash/node-0"},
	"the list of another node's trash":        {broken: own + "trash/node-0/"},
	"a piece of another node's trash":         {broken: own + "trash/node-0/pvc-old.uid+1048576"},
	"another node's trash, shared":            {broken: own + "trash/node-0", shared: true, beside: own + "published/node-0"},
	"a piece of another node's trash, shared": {broken: own + "trash/node-0/pvc-old.uid", shared: true, says: "-"},
}

const own = ".hostpath-provisioner/"

func TestUnreadableLeftoverKeepsNothingFromBeingServed(t *testing.T) {
	testenv.NeedRoot(t)
	for name, c := range unreadable {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			rotten.Mount(t, filepath.Join(root, "pool"), func(root string) {
				for _, entry := range []string{"pvc-1", own + "volumes", c.beside} {
					must.Succeed(t, os.MkdirAll(filepath.Join(root, entry), 0o755))
				}
				if c.record {
					record := `{"version":1,"id":"pvc-old","uid":"uid","mode":"mount","bytes":1048576,"created":"2026-11-20T18:56:54Z"}`
					must.Succeed(t, os.WriteFile(filepath.Join(root, own, "volumes", "pvc-old.json"), []byte(record), 0o600))
				}
				if !strings.HasSuffix(c.broken, ".json") {
					must.Succeed(t, os.MkdirAll(filepath.Join(root, c.broken), 0o755))
				} else if !c.record {
					must.Succeed(t, os.WriteFile(filepath.Join(root, c.broken), nil, 0o600))
				}
			}, c.broken)
			synctest.Test(t, func(t *testing.T) {
				said := &diary{}
				h := newHarness(t, root)
				h.log, h.Quota = funcr.New(said.write, funcr.Options{}), &quotatest.Fake{}
				if c.shared {
					h.start(sharedPool)
				} else {
					h.start(local)
				}
				must.Succeed(t, h.publish("pvc-1", "a"))
				h.create("pvc-new", mib)
				h.later(3 * time.Minute)
				h.create("pvc-late", mib)
				h.wantServed("pvc-new", "pvc-late")
				h.wantKept(said, cmp.Or(c.says, "kept"), h.Path("pool", strings.TrimSuffix(c.broken, "/")))
			})
		})
	}
}

// wantKept expects an entry in its place, and a line about it in the log: not one for each minute.
func (h *harness) wantKept(said *diary, says, path string) {
	h.t.Helper()
	entries := must.Value(os.ReadDir(filepath.Dir(path)))(h.t)
	if !slices.ContainsFunc(entries, func(e os.DirEntry) bool { return e.Name() == filepath.Base(path) }) {
		h.t.Errorf("%s is gone", path)
	}
	if n := said.count(says, filepath.Base(path)); (n == 0 || n > 2) && says != "-" {
		h.t.Errorf("%d lines say %q of %s, want one or two:\n%s", n, says, path, strings.Join(said.lines, "\n"))
	}
}
