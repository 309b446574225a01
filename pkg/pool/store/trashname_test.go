package store_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

func TestTrashName(t *testing.T) {
	for name, want := range map[string]store.TrashName{
		"pvc-1.u+4096":               {Of: "pvc-1", UID: "u", Promised: 4096},
		"pvc.1.u+0":                  {Of: "pvc.1", UID: "u"},
		"pvc-1.u":                    {Of: "pvc-1", UID: "u", Promised: volume.Unknown},
		"u+4096":                     {UID: "u", Promised: 4096},
		"u":                          {UID: "u", Promised: volume.Unknown},
		"pvc-1.u+-1":                 {Of: "pvc-1", UID: "u+-1", Promised: volume.Unknown},
		"pvc-1.u+04096":              {Of: "pvc-1", UID: "u+04096", Promised: volume.Unknown},
		"pvc-1.u+99999999999999999":  {Of: "pvc-1", UID: "u+99999999999999999", Promised: volume.Unknown},
		"pvc-1.u+99999999999999999x": {Of: "pvc-1", UID: "u+99999999999999999x", Promised: volume.Unknown},
	} {
		if diff := cmp.Diff(want, store.ParseTrashName(name)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func FuzzParseTrashName(f *testing.F) {
	for _, name := range []string{"pvc-1.u+4096", "pvc-1.u", "u", ".u", "a.+1", "+", "a..+0"} {
		f.Add(name)
	}
	f.Fuzz(func(t *testing.T, name string) {
		thrown := store.ParseTrashName(name)
		if again := store.ParseTrashName(thrown.String()); again != thrown {
			t.Errorf("%q is %+v, and written and read again %+v", name, thrown, again)
		}
	})
}
