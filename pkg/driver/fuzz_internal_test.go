package driver

import (
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

func FuzzParseToken(f *testing.F) {
	for _, seed := range []string{"", "after:pvc-1", "after:", "after:../x", "AFTER:pvc-1", "pvc-1", "after:after:x", "after:x\x00"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, token string) {
		id, err := parseToken(token)
		if err != nil {
			if status.Code(err) != codes.Aborted || id != (volume.ID{}) {
				t.Errorf("%v and error %v, want none and ABORTED", id, err)
			}
			return
		}
		if (token == "") != (id == volume.ID{}) || token != "" && tokenPrefix+id.String() != token || strings.ContainsAny(id.String(), "/:") {
			t.Errorf("%q is the token of %q", token, id)
		}
	})
}
