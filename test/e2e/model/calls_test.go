package model

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"pgregory.net/rapid"

	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
)

var background = context.Background()

func (h *harness) actions() map[string]func(*rapid.T) {
	return map[string]func(*rapid.T){
		"create":          func(*rapid.T) { h.create() },
		"copy":            func(*rapid.T) { h.copy() },
		"delete":          func(*rapid.T) { h.delete() },
		"snapshot":        func(*rapid.T) { h.snapshot() },
		"delete snapshot": func(*rapid.T) { h.deleteSnapshot() },
		"list snapshots":  func(*rapid.T) { h.listSnapshots() },
		"write":           func(*rapid.T) { h.write() },
		"publish":         func(*rapid.T) { h.publish() },
		"publish inline":  func(*rapid.T) { h.publishInline() },
		"unpublish":       func(*rapid.T) { h.unpublish() },
		"expand":          func(*rapid.T) { h.expand() },
		"stats":           func(*rapid.T) { h.stats() },
		"list":            func(*rapid.T) { h.list() },
		"wait":            func(*rapid.T) { h.wait() },
		"restart":         func(*rapid.T) { h.restart() },
		"crash":           func(*rapid.T) { h.crash() },
		"hand":            func(*rapid.T) { h.hand() },
		"":                func(*rapid.T) { h.check() },
	}
}

func pick[T any](h *harness, what string, from ...T) T {
	return rapid.SampledFrom(from).Draw(h.T, what)
}

func (h *harness) flip(what string) bool { return pick(h, what, false, true) }

func (h *harness) sizes() volume.Range {
	r := volume.Range{Required: pick(h, "required", sizes...)}
	if h.flip("limited") {
		r.Limit = pick(h, "limit", sizes...)
	}
	return r
}

// answer compares what a call answered with what it should have.
func (h *harness) answer(got, want error, call string, arguments ...any) {
	h.Logf("%s: %v", fmt.Sprintf(call, arguments...), got)
	if !errors.Is(got, want) {
		h.Fatalf("%s: %v, want %v", fmt.Sprintf(call, arguments...), got, want)
	}
}

// A creation is one that is asked for.
type creation struct {
	name, pool string
	mode       volume.Mode
	sizes      volume.Range
	inline     bool
	// source is what the volume is to be made from; empty for nothing.
	source string
	// elsewhere: the source may be on another node.
	elsewhere bool
}

func (h *harness) create() {
	h.make(creation{
		name: pick(h, "id", ids...), pool: pick(h, "pool", pools...), mode: pick(h, "mode", volume.ModeMount, volume.ModeBlock), sizes: h.sizes(),
	})
}

func (h *harness) make(c creation) {
	want := h.mayCreate(c)
	request := pool.Request{ID: id(c.name), Pool: poolName(c.pool), Mode: c.mode, Range: c.sizes}
	if c.source != "" {
		request.Source = &pool.Source{ID: id(c.source), Elsewhere: c.elsewhere}
		h.awaitTick(c.source)
	}
	unlock := h.lock(c.name)
	got, err := h.set.Create(background, request)
	unlock()
	h.answer(err, want, "create %+v", c)
	if err != nil {
		return
	}
	v := h.volumes[c.name]
	h.stamp(c.name, v)
	if got.ID.String() != c.name || got.Pool.String() != c.pool || got.Mode != c.mode || got.Bytes != h.bytes(v) {
		h.Fatalf("created %+v, want %+v", got, v)
	}
}

// mayCreate is the answer to a creation. If it is nil the model has the volume.
func (h *harness) mayCreate(c creation) error {
	v, source := h.volumes[c.name], h.volumes[c.source]
	switch {
	case c.sizes.Limit > 0 && c.sizes.Required > c.sizes.Limit:
		return volume.ErrOutOfRange
	case v != nil && v.pool != c.pool:
		return volume.ErrExists
	case source != nil && source.pool != c.pool:
		return volume.ErrInvalid
	case v != nil && v.torn:
		return volume.ErrDamagedRecord
	case v != nil && v.dir == nil:
		return volume.ErrLost
	case v != nil:
		return h.mayRepeat(c, v)
	}
	dir, from := &directory{disk: c.mode == volume.ModeBlock}, origin{}
	if c.source != "" {
		if err := h.mayCopyTo(c); err != nil {
			return err
		}
		dir.stamp, from = source.dir.stamp, origin{c.source, least(c.source, source)}
		if c.sizes.Required == 0 {
			c.sizes.Required = from.bytes
			if c.sizes.Limit > 0 {
				c.sizes.Required = min(from.bytes, c.sizes.Limit)
			}
		}
	}
	bytes, err := round(c.sizes)
	if err != nil {
		return err
	}
	if bytes < from.bytes {
		return volume.ErrOutOfRange
	}
	if bytes > h.available(c.pool) {
		return volume.ErrNoSpace
	}
	h.volumes[c.name] = &modelVolume{
		pool:   c.pool,
		dir:    dir,
		record: &record{bytes: bytes, mode: c.mode, kept: c.pool == kept, inline: c.inline, origin: from},
	}
	return nil
}

// mayRepeat is the answer to a creation of a volume that is there.
func (h *harness) mayRepeat(c creation, v *modelVolume) error {
	has, p := h.bytes(v), v.promise()
	if has < c.sizes.Required || c.sizes.Limit > 0 && has > c.sizes.Limit || p.mode != c.mode || p.inline != c.inline || p.origin.id != c.source {
		return volume.ErrExists
	}
	return nil
}

func (h *harness) delete() {
	name := pick(h, "id", ids...)
	v, want := h.volumes[name], error(nil)
	switch {
	case v == nil:
		want = volume.ErrNotFound
	case len(h.published(v, "")) > 0:
		want = volume.ErrInUse
	default:
		delete(h.volumes, name)
	}
	unlock := h.lock(name)
	err := h.set.Delete(background, id(name))
	unlock()
	h.answer(err, want, "delete %s", name)
}

// publication draws one; flags that are not read-only are the business of pkg/hostfs/bind.
func (h *harness) publication(mode volume.Mode) (name, target string, p pool.Publication) {
	name, target = pick(h, "id", ids...), pick(h, "target", targets...)
	p = pool.Publication{ID: id(name), Target: h.target(target), Mode: mode, ReadOnly: h.flip("read-only"), SingleTarget: h.flip("single target")}
	return name, target, p
}

func (h *harness) publish() {
	name, target, p := h.publication(pick(h, "mode", volume.ModeMount, volume.ModeBlock))
	in := pick(h, "pool", append([]string{""}, pools...)...)
	want := h.mayPublish(name, target, p)
	if in != "" {
		p.Pool = poolName(in)
	}
	unlock, err := h.set.Publications().Lock(p)
	must.Succeed(h, err)
	err = h.set.Publications().Publish(background, p)
	unlock()
	h.answer(err, want, "publish %s %s of %q at %s, read-only %v, single %v", p.Mode, name, in, target, p.ReadOnly, p.SingleTarget)
}

// mayPublish is the answer to a publication. If it is nil the model has it.
func (h *harness) mayPublish(name, target string, p pool.Publication) error {
	v := h.volumes[name]
	switch {
	case v == nil: // in whatever pool
		return volume.ErrNotFound
	case v.torn:
		return volume.ErrDamagedRecord
	case v.dir == nil:
		return volume.ErrNotFound
	case v.promise().mode != p.Mode:
		return volume.ErrInvalid
	case p.SingleTarget && len(h.published(v, target)) > 0 && !h.publishedAt(v, target):
		// Where it is published already, that it is elsewhere too does not matter (CSI 1.13, NodePublishVolume).
		return volume.ErrInUse
	}
	want := publication{dir: v.dir, device: p.Mode == volume.ModeBlock, readOnly: p.ReadOnly}
	isDevice, left := h.left[target]
	switch at := h.targets[target]; {
	case at != nil && *at != want, at == nil && left && isDevice != want.device:
		return volume.ErrExists
	}
	h.targets[target] = &want
	delete(h.left, target)
	return nil
}

func (h *harness) publishInline() {
	name, target, p := h.publication(volume.ModeMount)
	in, r := pick(h, "pool", pools...), h.sizes()
	was := h.volumes[name] != nil
	want := h.mayCreate(creation{name: name, pool: in, mode: volume.ModeMount, sizes: r, inline: true})
	v := h.volumes[name]
	if want == nil {
		want = h.mayPublish(name, target, p)
		if want != nil && !was {
			delete(h.volumes, name)
		}
	}
	unlock := h.lockTarget(name, target)
	err := h.set.Publications().PublishInline(background, pool.Request{ID: id(name), Pool: poolName(in), Range: r}, p)
	unlock()
	h.answer(err, want, "publish inline %s of %d to %d in %s at %s", name, r.Required, r.Limit, in, target)
	if err == nil {
		h.stamp(name, v)
	}
}

func (h *harness) unpublish() {
	name, target := pick(h, "id", ids...), pick(h, "target", targets...)
	want := h.mayUnpublish(name, target)
	unlock, err := h.set.ShareTarget(id(name), h.target(target))
	must.Succeed(h, err)
	err = h.set.Publications().Unpublish(background, id(name), h.target(target))
	unlock()
	h.answer(err, want, "unpublish %s from %s", name, target)
}

// mayUnpublish is the answer to the end of a publication: whatever is there goes,
// unless it is another volume.
func (h *harness) mayUnpublish(name, target string) error {
	if at := h.targets[target]; at != nil {
		if owner, _ := h.owner(at.dir); owner != "" && owner != name {
			return volume.ErrInUse
		}
	}
	delete(h.targets, target)
	delete(h.left, target)
	if v := h.volumes[name]; v != nil && v.promise().inline && len(h.published(v, "")) == 0 {
		delete(h.volumes, name)
	}
	return nil
}

func (h *harness) expand() {
	name, target, mode, r := pick(h, "id", ids...), pick(h, "target", targets...), pick(h, "mode", volume.ModeMount, volume.ModeBlock, ""), h.sizes()
	bytes, want := h.mayExpand(name, target, mode, r)
	unlock := h.lock(name)
	got, err := h.set.Expand(background, id(name), h.target(target), mode, r)
	unlock()
	h.answer(err, want, "expand %q %s at %s to %d, at most %d", mode, name, target, r.Required, r.Limit)
	if got != bytes {
		h.Fatalf("expanded to %d, want %d", got, bytes)
	}
}

func (h *harness) mayExpand(name, target string, mode volume.Mode, r volume.Range) (int64, error) {
	v := h.volumes[name]
	switch {
	case r.Limit > 0 && r.Required > r.Limit:
		return 0, volume.ErrOutOfRange
	case v == nil:
		return 0, volume.ErrNotFound
	case v.torn:
		return 0, volume.ErrDamagedRecord
	case v.dir == nil:
		return 0, volume.ErrNotFound
	case mode != "" && mode != v.promise().mode:
		return 0, volume.ErrInvalid
	case !h.carries(target, v):
		return 0, volume.ErrNotFound
	}
	has := h.bytes(v)
	if r.Limit > 0 && r.Limit < has {
		return 0, volume.ErrOutOfRange
	}
	if r.Required <= has {
		return has, nil
	}
	if !v.promised() {
		return 0, volume.ErrCannotGrow
	}
	bytes, err := round(r)
	if err != nil && r.Limit > 0 {
		return 0, err
	}
	if err != nil || bytes-has > h.available(v.pool) {
		return 0, volume.ErrCannotGrow
	}
	v.record.bytes = bytes
	return bytes, nil
}

// carries reports whether a target carries a volume as what it is.
func (h *harness) carries(target string, v *modelVolume) bool {
	at := h.targets[target]
	return at != nil && at.dir == v.dir
}

func (h *harness) stats() {
	name, target := pick(h, "id", ids...), pick(h, "target", targets...)
	v, want := h.volumes[name], error(nil)
	if v == nil || v.dir != nil && !h.carries(target, v) {
		want = volume.ErrNotFound
	}
	got, err := h.set.Publications().Stats(background, id(name), h.target(target))
	h.answer(err, want, "stats of %s at %s", name, target)
	if err != nil {
		return
	}
	if abnormal := v.torn || v.dir == nil; got.Condition.Abnormal != abnormal {
		h.Fatalf("stats %+v, want an abnormal condition: %v", got, abnormal)
	}
	size := h.size(v.pool)
	if p := v.promise(); p.kept || p.mode == volume.ModeBlock {
		size = p.bytes
	}
	if v.dir != nil && got.Space.SizeBytes != size {
		h.Fatalf("stats %+v, want the size %d", got, size)
	}
}

func (h *harness) list() {
	after, most := pick(h, "after", append([]string{""}, ids...)...), pick(h, "most", 1, 2, 10)
	want := slices.DeleteFunc(h.sorted(), isSnapshot)
	want = want[len(want)-h.countAfter(want, after):]
	var from volume.ID
	if after != "" {
		from = id(after)
	}
	for {
		page, next := h.set.List(background, from, most)
		for _, v := range page {
			if len(want) == 0 || v.ID.String() != want[0] {
				h.Fatalf("after %s comes %s, want %v", from, v.ID, want)
			}
			h.same(v)
			want = want[1:]
		}
		if next == (volume.ID{}) {
			break
		}
		from = next
	}
	if len(want) > 0 {
		h.Fatalf("the list ends before %v", want)
	}
}

func (h *harness) countAfter(sorted []string, after string) (n int) {
	for _, name := range sorted {
		if strings.Compare(name, after) > 0 {
			n++
		}
	}
	return n
}

func (h *harness) sorted() (names []string) {
	for name := range h.volumes {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// bytes is the size that is reported of a volume.
func (h *harness) bytes(v *modelVolume) int64 {
	if v.promised() {
		return v.record.bytes
	}
	return h.size(v.pool)
}
