package pool_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/funcr"
	"github.com/google/go-cmp/cmp"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota/quotatest"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// A sort of volume is one whose record, or whose way through a start, is not that of another.
type sort struct {
	// keeper has the kernel enforce the sizes; empty if nothing does.
	keeper                         quota.Kind
	block, thin, inline, published bool
}

// sorts are all kinds of volumes.
var sorts = map[string]sort{
	"a directory":                            {},
	"a directory that is published":          {published: true},
	"a directory that XFS limits":            {keeper: quota.XFS},
	"a published directory that ext4 limits": {keeper: quota.Ext4, published: true},
	"a directory that btrfs limits":          {keeper: quota.Btrfs},
	"an inline volume":                       {inline: true, published: true},
	"an inline volume that XFS limits":       {keeper: quota.XFS, inline: true, published: true},
	"a thick disk":                           {block: true},
	"a thick disk that XFS limits":           {keeper: quota.XFS, block: true},
	"a published disk that XFS limits":       {keeper: quota.XFS, block: true, published: true},
	"a published disk that btrfs limits":     {keeper: quota.Btrfs, block: true, published: true},
	"a thin disk":                            {block: true, thin: true},
	"a published thin disk that ext4 limits": {keeper: quota.Ext4, block: true, thin: true, published: true},
}

func (s sort) pools() string {
	if s.thin {
		return strings.Replace(aPoolAndAnother, `"path":"pool"`, `"path":"pool","allocation":"thin"`, 1)
	}
	return aPoolAndAnother
}

// make makes pvc-1, with data, and publishes it for "pod".
func (s sort) make(h *harness) {
	h.t.Helper()
	request := pool.Request{ID: id(h.t, "pvc-1"), Range: volume.Range{Required: mib}}
	switch {
	case s.inline:
		must.Succeed(h.t, h.Publications().PublishInline(h.t.Context(), request, pool.Publication{ID: request.ID, Target: h.Target("pod")}))
	case s.block:
		h.createBlock("pvc-1", mib)
	default:
		h.create("pvc-1", mib)
	}
	if s.published && !s.inline {
		must.Succeed(h.t, s.publish(h, "pod"))
	}
	f, err := os.OpenFile(s.data(h), os.O_WRONLY|os.O_CREATE, 0o600)
	must.Succeed(h.t, err)
	_, err = f.WriteString("data")
	must.Succeed(h.t, err)
	must.Succeed(h.t, f.Close())
}

func (s sort) publish(h *harness, target string) error {
	if s.block {
		return h.publishBlock("pvc-1", target)
	}
	return h.publish("pvc-1", target)
}

func (s sort) data(h *harness) string {
	if s.block {
		return h.Path("pool", "pvc-1", "disk.img")
	}
	return h.Path("pool", "pvc-1", "data")
}

// state is what a user has of pvc-1, whatever its record says.
type state struct {
	Data   string
	Inode  string
	ID     quota.ID
	Limit  int64
	Nodes  int // that it is published on
	Device []string
}

func (s sort) state(h *harness) state {
	h.t.Helper()
	f, err := os.Open(s.data(h))
	must.Succeed(h.t, err)
	defer f.Close()
	content := make([]byte, len("data"))
	_, err = f.Read(content)
	must.Succeed(h.t, err)
	now := state{
		Data:  string(content),
		Inode: tree(h.t, s.data(h))[s.data(h)],
		Nodes: len(h.volume("pvc-1").Nodes),
	}
	if s.keeper != "" {
		now.ID, now.Limit = h.carried("pvc-1"), h.limitOf("pvc-1")
	}
	devices, err := h.Loops.Attached()
	must.Succeed(h.t, err)
	for _, d := range devices {
		now.Device = append(now.Device, d.Name)
	}
	return now
}

// withSort is withTwoPools for a pvc-1 of a sort.
func withSort(t *testing.T, s sort, test func(t *testing.T, b *harness)) {
	t.Helper()
	root := testenv.Tmpfs(t, 256*mib)
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, root)
		if s.keeper != "" {
			h.Quota = &quotatest.Fake{As: s.keeper}
		}
		h.start(s.pools())
		s.make(h)
		h.create("pvc-2", mib)
		_, err := h.Create(t.Context(), pool.Request{ID: id(t, "pvc-3"), Pool: poolName(t, "other"), Range: volume.Range{Required: mib}})
		must.Succeed(t, err)
		must.Succeed(t, os.WriteFile(h.Path("canary"), []byte("canary"), 0o600))
		test(t, h)
	})
}

// restartSaying is restart with a log of its own.
func (h *harness) restartSaying(datadir string) *diary {
	h.t.Helper()
	said := &diary{}
	h.log = funcr.New(said.write, funcr.Options{})
	h.restart(datadir)
	return said
}

// badFields are what no record has, and what is said of them.
var badFields = map[string]struct {
	fields map[string]any
	says   string
}{
	"of another volume":              {map[string]any{"id": "pvc-2"}, "pvc-2"},
	"of a newer version":             {map[string]any{"version": 4, "id": map[string]any{"name": "pvc-1"}}, "version 4"},
	"of the version of snapshots":    {map[string]any{"version": 2}, ""},
	"without a version":              {map[string]any{"version": nil}, "version 0"},
	"of an unknown mode":             {map[string]any{"mode": "tape"}, "tape"},
	"with a negative size":           {map[string]any{"bytes": -1}, "-1"},
	"with a size beyond all disks":   {map[string]any{"bytes": int64(1<<63 - 1)}, "9223372036854775807"},
	"with a size beyond all numbers": {map[string]any{"bytes": 1e30}, "1e"},
	"with a uid that climbs":         {map[string]any{"uid": "../../x"}, "../../x"},
	"with a uid that has a dot":      {map[string]any{"uid": "by.hand"}, "by.hand"},
	"with a uid for too long a name": {map[string]any{"uid": "0123456789abcdef0123456789ab"}, "0123456789abcdef0123456789ab"},
	"with a project id of others":    {map[string]any{"quota": "xfs", "projectID": 1}, "project id"},
	"with an id and no quota":        {map[string]any{"quota": nil, "projectID": uint64(quota.FirstID)}, ""},
	"with a block that no disk has":  {map[string]any{"blockBytes": 7}, "block"},
}

// with is a record with other fields, or without those that are nil.
func with(t *testing.T, record []byte, fields map[string]any) []byte {
	t.Helper()
	var all map[string]any
	must.Succeed(t, json.Unmarshal(record, &all))
	maps.Copy(all, fields)
	maps.DeleteFunc(all, func(_ string, value any) bool { return value == nil })
	text := must.Value(json.Marshal(all))(t)
	return text
}

// spoilers are ways in which the record of pvc-1 can be lost: those of any file, and what
// this one can say wrongly, or say in part.
func (h *harness) spoilers() map[string]func(path string) error {
	h.t.Helper()
	whole, err := os.ReadFile(h.Own("volumes", "pvc-1.json"))
	must.Succeed(h.t, err)
	another, err := os.ReadFile(h.Own("volumes", "pvc-2.json"))
	must.Succeed(h.t, err)
	texts := map[string][]byte{"that of another volume": another, "twice": append(whole[:len(whole):len(whole)], whole...)}
	for name, bad := range badFields {
		texts[name] = with(h.t, whole, bad.fields)
	}
	const step = 37 // of some 200 to 300; every byte is tried for a directory
	for length := 1; length < len(whole)-1; length += step {
		texts[fmt.Sprintf("its first %d bytes", length)] = whole[:length]
	}
	all := maps.Clone(spoilt)
	for name, text := range texts {
		all[name] = func(path string) error { return os.WriteFile(path, text, 0o600) }
	}
	return all
}

func TestBadRecordOfAnyKindAffectsOneVolume(t *testing.T) {
	for nth, name := range slices.Sorted(maps.Keys(sorts)) {
		s := sorts[name]
		t.Run(name, func(t *testing.T) {
			withSort(t, s, func(t *testing.T, h *harness) {
				record, want := h.Own("volumes", "pvc-1.json"), s.state(h)
				ways := h.spoilers()
				for i, name := range slices.Sorted(maps.Keys(ways)) {
					if testing.Short() && (i+nth)%4 != 0 {
						continue // another sort has it
					}
					spoil(t, record, ways[name])
					s.wantOneBad(h, want)
					if said := h.volume("pvc-1").Condition.Message; !strings.Contains(said, badFields[name].says) {
						t.Errorf("the condition %q does not say %q", said, badFields[name].says)
					}
					must.Succeed(t, os.RemoveAll(record))
					must.Succeed(t, os.Rename(record+".was", record))
					if t.Failed() {
						t.Fatalf("with the record replaced by %s", name)
					}
				}
				h.restart(s.pools())
				if got := h.volume("pvc-1"); got.Condition.Abnormal {
					t.Errorf("with its record back it is %+v", got)
				}
				if diff := cmp.Diff(want, s.state(h)); diff != "" {
					t.Errorf("with its record back it is another (-before +after):\n%s", diff)
				}
				must.Succeed(t, s.publish(h, "again"))
				must.Succeed(t, h.unpublish("pvc-1", "again"))
			})
		})
	}
}

// wantOneBad starts the driver twice, and says that pvc-1 is out of order and otherwise as
// it was, and that all else is in order.
func (s sort) wantOneBad(h *harness, want state) {
	h.t.Helper()
	before := files(h.t, h.Own("volumes"))
	for range 2 {
		said := h.restartSaying(s.pools())
		h.wantVolumes("pvc-1", "pvc-2", "pvc-3")
		h.wantToldOf(said)
		wantError(h.t, s.publish(h, "a"), volume.ErrDamagedRecord)
		_, err := h.Create(h.t.Context(), pool.Request{ID: id(h.t, "pvc-1"), Range: volume.Range{Required: mib}})
		wantError(h.t, err, volume.ErrDamagedRecord)
		_, err = h.Expand(h.t.Context(), id(h.t, "pvc-1"), h.Target("pod"), "", volume.Range{Required: 2 * mib})
		wantError(h.t, err, volume.ErrDamagedRecord)
		if s.published {
			wantError(h.t, h.Delete(h.t.Context(), id(h.t, "pvc-1")), volume.ErrInUse)
		}
		h.wantServed("pvc-2", "pvc-3")
		h.create("pvc-4", mib)
		if s.keeper != "" && h.carried("pvc-4") == want.ID {
			h.t.Errorf("the id %d was given again", want.ID)
		}
		h.delete("pvc-4")
		h.later(2 * time.Minute)
		if diff := cmp.Diff(want, s.state(h)); diff != "" {
			h.t.Errorf("the volume is not what it was (-before +after):\n%s", diff)
		}
		if diff := cmp.Diff(before, files(h.t, h.Own("volumes"))); diff != "" {
			h.t.Errorf("the records are not what they were (-before +after):\n%s", diff)
		}
	}
}

// wantToldOf says that the record of pvc-1 is reported of, in the log and as a condition.
func (h *harness) wantToldOf(said *diary) {
	h.t.Helper()
	if n := said.count("Record is unreadable", "pvc-1"); n != 1 {
		h.t.Errorf("the log has %d times of the bad record, want once: %q", n, said.lines)
	}
	if v := h.volume("pvc-1"); !v.Condition.Abnormal || !strings.Contains(v.Condition.Message, "record") {
		h.t.Errorf("the condition is %+v, want it to report the record", v.Condition)
	}
}

// What has no record that can be read does not go with its pod, and goes when that is
// asked for.
func TestUnpublishAndDeleteWithBadRecord(t *testing.T) {
	for name, s := range sorts {
		t.Run(name, func(t *testing.T) {
			withSort(t, s, func(t *testing.T, h *harness) {
				want := s.state(h)
				must.Succeed(t, os.WriteFile(h.Own("volumes", "pvc-1.json"), []byte("{"), 0o600))
				h.restart(s.pools())
				must.Succeed(t, h.unpublish("pvc-1", "pod"))
				want.Nodes, want.Device = 0, nil
				if diff := cmp.Diff(want, s.state(h)); diff != "" {
					t.Errorf("unpublished it is not what it was (-before +after):\n%s", diff)
				}
				h.delete("pvc-1")
				h.later(2 * time.Minute)
				h.wantVolumes("pvc-2", "pvc-3")
				h.wantClean()
				if s.keeper == quota.XFS || s.keeper == quota.Ext4 {
					h.create("pvc-4", mib)
					if got := h.carried("pvc-4"); got != want.ID {
						t.Errorf("the next volume has the id %#x, want %#x: that was not given back", got, want.ID)
					}
				}
			})
		})
	}
}

func TestCopiedRecordOfAnyKindIsIgnored(t *testing.T) {
	for name, s := range sorts {
		t.Run(name, func(t *testing.T) {
			withSort(t, s, func(t *testing.T, h *harness) {
				want, promised := s.state(h), h.Status()[0].Promised
				record := must.Value(os.ReadFile(h.Own("volumes", "pvc-1.json")))(t)
				for _, name := range []string{"pvc-9.json", "pvc-1.json.bak", "pvc-1.JSON", ".pvc-1.json", "x y.json", "..json", ".json"} {
					must.Succeed(t, os.WriteFile(h.Own("volumes", name), record, 0o600))
				}
				before := files(t, h.Own("volumes"))
				for range 2 {
					said := h.restartSaying(s.pools())
					h.wantVolumes("pvc-1", "pvc-2", "pvc-3", "pvc-9")
					h.wantServed("pvc-2", "pvc-3")
					if v := h.volume("pvc-9"); !v.Lost || !strings.Contains(v.Condition.Message, `"pvc-1"`) || said.count("Record is unreadable", "pvc-9") != 1 {
						t.Errorf("volume %+v, want it lost, and reported", v)
					}
					_, err := h.Create(t.Context(), pool.Request{ID: id(t, "pvc-9"), Range: volume.Range{Required: mib}})
					wantError(t, err, volume.ErrDamagedRecord)
					if now := h.Status()[0].Promised; now != promised {
						t.Errorf("%d bytes are promised, want %d", now, promised)
					}
					h.later(2 * time.Minute)
					if diff := cmp.Diff(before, files(t, h.Own("volumes"))); diff != "" {
						t.Errorf("the records changed (-before +after):\n%s", diff)
					}
				}
				h.delete("pvc-9")
				h.later(2 * time.Minute)
				h.wantVolumes("pvc-1", "pvc-2", "pvc-3")
				if diff := cmp.Diff(want, s.state(h)); diff != "" {
					t.Errorf("the volume is not what it was (-before +after):\n%s", diff)
				}
				if got := h.volume("pvc-1"); got.Condition.Abnormal {
					t.Errorf("the volume is %+v, want it in order", got)
				}
			})
		})
	}
}
