package driver_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"kubevirt.io/hostpath-provisioner/test/must"
)

func (h *harness) page(t *testing.T, token string, most int32) *csi.ListVolumesResponse {
	t.Helper()
	response := must.Value(h.ListVolumes(t.Context(), &csi.ListVolumesRequest{StartingToken: token, MaxEntries: most}))(t)
	return response
}

// A page is in memory several times until it is sent.
func TestListVolumesPageLimit(t *testing.T) {
	const volumes = 2001
	root := t.TempDir()
	for i := range volumes {
		must.Succeed(t, os.Mkdir(filepath.Join(root, fmt.Sprintf("pvc-%d", i)), 0o750))
	}
	h := newHarness(t, setup{pools: `[{"name":"local","path":"` + root + `"}]`})
	for _, most := range []int32{0, volumes} {
		var sizes []int
		for token := ""; len(sizes) == 0 || token != ""; {
			page := h.page(t, token, most)
			sizes = append(sizes, len(page.GetEntries()))
			token = page.GetNextToken()
		}
		wantEqual(t, fmt.Sprintf("the sizes of pages of %d", most), sizes, []int{1000, 1000, 1})
	}
}

// What the index has, and the disk has no more, was deleted since the page was begun.
func TestListVolumesPageOfDeletedVolumesIsFilled(t *testing.T) {
	h := newHarness(t, setup{})
	for _, id := range []string{"a", "b", "c", "d", "e", "f"} {
		h.create(t, id, "")
	}
	remove := func(ids ...string) {
		t.Helper()
		for _, id := range ids {
			must.Succeed(t, os.RemoveAll(h.path("local", id)))
			must.Succeed(t, os.Remove(h.path("local", ".hostpath-provisioner/volumes/"+id+".json")))
		}
	}
	remove("a", "b", "c")
	first := h.page(t, "", 2)
	wantEqual(t, "the first page", idsOf(first), []string{"d", "e"})
	remove("f")
	wantEqual(t, "the last page", h.page(t, first.GetNextToken(), 2), &csi.ListVolumesResponse{})
	remove("d", "e")
	wantEqual(t, "the only page", h.page(t, "", 1), &csi.ListVolumesResponse{})
}

func TestListVolumesInvalidToken(t *testing.T) {
	h := newHarness(t, setup{})
	h.create(t, "vol", "")
	for _, token := range []string{"vol", "after:a/b"} {
		t.Run("the token "+token, func(t *testing.T) {
			_, err := h.ListVolumes(t.Context(), &csi.ListVolumesRequest{StartingToken: token})
			wantCode(t, err, codes.Aborted, "token")
		})
	}
	t.Run("a negative limit", func(t *testing.T) {
		_, err := h.ListVolumes(t.Context(), &csi.ListVolumesRequest{MaxEntries: -1})
		wantCode(t, err, codes.InvalidArgument, "max_entries", "-1")
	})
}
