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

func (w *world) actions() map[string]func(*rapid.T) {
	return map[string]func(*rapid.T){
		"create":          func(*rapid.T) { w.create() },
		"copy":            func(*rapid.T) { w.copy() },
		"delete":          func(*rapid.T) { w.delete() },
		"snapshot":        func(*rapid.T) { w.snapshot() },
		"delete snapshot": func(*rapid.T) { w.deleteSnapshot() },
		"list snapshots":  func(*rapid.T) { w.listSnapshots() },
		"write":           func(*rapid.T) { w.write() },
		"publish":         func(*rapid.T) { w.publish() },
		"publish inline":  func(*rapid.T) { w.publishInline() },
		"unpublish":       func(*rapid.T) { w.unpublish() },
		"expand":          func(*rapid.T) { w.expand() },
		"stats":           func(*rapid.T) { w.stats() },
		"list":            func(*rapid.T) { w.list() },
		"wait":            func(*rapid.T) { w.wait() },
		"restart":         func(*rapid.T) { w.restart() },
		"crash":           func(*rapid.T) { w.crash() },
		"hand":            func(*rapid.T) { w.hand() },
		"":                func(*rapid.T) { w.check() },
	}
}

func pick[T any](w *world, what string, from ...T) T {
	return rapid.SampledFrom(from).Draw(w.T, what)
}

func (w *world) flip(what string) bool { return pick(w, what, false, true) }

func (w *world) sizes() volume.Range {
	r := volume.Range{Required: pick(w, "required", sizes...)}
	if w.flip("limited") {
		r.Limit = pick(w, "limit", sizes...)
	}
	return r
}

// answer compares what a call answered with what it should have.
func (w *world) answer(got, want error, call string, arguments ...any) {
	w.Logf("%s: %v", fmt.Sprintf(call, arguments...), got)
	if !errors.Is(got, want) {
		w.Fatalf("%s: %v, want %v", fmt.Sprintf(call, arguments...), got, want)
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

func (w *world) create() {
	w.make(creation{
		name: pick(w, "id", ids...), pool: pick(w, "pool", pools...), mode: pick(w, "mode", volume.ModeMount, volume.ModeBlock), sizes: w.sizes(),
	})
}

func (w *world) make(c creation) {
	want := w.mayCreate(c)
	request := pool.Request{ID: id(c.name), Pool: poolName(c.pool), Mode: c.mode, Range: c.sizes}
	if c.source != "" {
		request.Source = &pool.Source{ID: id(c.source), Elsewhere: c.elsewhere}
		w.awaitTick(c.source)
	}
	unlock := w.lock(c.name)
	got, err := w.set.Create(background, request)
	unlock()
	w.answer(err, want, "create %+v", c)
	if err != nil {
		return
	}
	v := w.volumes[c.name]
	w.stamp(c.name, v)
	if got.ID.String() != c.name || got.Pool.String() != c.pool || got.Mode != c.mode || got.Bytes != w.bytes(v) {
		w.Fatalf("created %+v, want %+v", got, v)
	}
}

// mayCreate is the answer to a creation. If it is nil the model has the volume.
func (w *world) mayCreate(c creation) error {
	v, source := w.volumes[c.name], w.volumes[c.source]
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
		return w.mayRepeat(c, v)
	}
	dir, from := &directory{disk: c.mode == volume.ModeBlock}, origin{}
	if c.source != "" {
		if err := w.mayCopyTo(c); err != nil {
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
	if bytes > w.available(c.pool) {
		return volume.ErrNoSpace
	}
	w.volumes[c.name] = &modelVolume{
		pool:   c.pool,
		dir:    dir,
		record: &record{bytes: bytes, mode: c.mode, kept: c.pool == kept, inline: c.inline, origin: from},
	}
	return nil
}

// mayRepeat is the answer to a creation of a volume that is there.
func (w *world) mayRepeat(c creation, v *modelVolume) error {
	has, p := w.bytes(v), v.promise()
	if has < c.sizes.Required || c.sizes.Limit > 0 && has > c.sizes.Limit || p.mode != c.mode || p.inline != c.inline || p.origin.id != c.source {
		return volume.ErrExists
	}
	return nil
}

func (w *world) delete() {
	name := pick(w, "id", ids...)
	v, want := w.volumes[name], error(nil)
	switch {
	case v == nil:
		want = volume.ErrNotFound
	case len(w.published(v, "")) > 0:
		want = volume.ErrInUse
	default:
		delete(w.volumes, name)
	}
	unlock := w.lock(name)
	err := w.set.Delete(background, id(name))
	unlock()
	w.answer(err, want, "delete %s", name)
}

// publication draws one; flags that are not read-only are the business of pkg/hostfs/bind.
func (w *world) publication(mode volume.Mode) (name, target string, p pool.Publication) {
	name, target = pick(w, "id", ids...), pick(w, "target", targets...)
	p = pool.Publication{ID: id(name), Target: w.target(target), Mode: mode, ReadOnly: w.flip("read-only"), SingleTarget: w.flip("single target")}
	return name, target, p
}

func (w *world) publish() {
	name, target, p := w.publication(pick(w, "mode", volume.ModeMount, volume.ModeBlock))
	in := pick(w, "pool", append([]string{""}, pools...)...)
	want := w.mayPublish(name, target, p)
	if in != "" {
		p.Pool = poolName(in)
	}
	unlock, err := w.set.Publications().Lock(p)
	must.Succeed(w, err)
	err = w.set.Publications().Publish(background, p)
	unlock()
	w.answer(err, want, "publish %s %s of %q at %s, read-only %v, single %v", p.Mode, name, in, target, p.ReadOnly, p.SingleTarget)
}

// mayPublish is the answer to a publication. If it is nil the model has it.
func (w *world) mayPublish(name, target string, p pool.Publication) error {
	v := w.volumes[name]
	switch {
	case v == nil: // in whatever pool
		return volume.ErrNotFound
	case v.torn:
		return volume.ErrDamagedRecord
	case v.dir == nil:
		return volume.ErrNotFound
	case v.promise().mode != p.Mode:
		return volume.ErrInvalid
	case p.SingleTarget && len(w.published(v, target)) > 0 && !w.publishedAt(v, target):
		// Where it is published already, that it is elsewhere too does not matter (CSI 1.13, NodePublishVolume).
		return volume.ErrInUse
	}
	want := publication{dir: v.dir, device: p.Mode == volume.ModeBlock, readOnly: p.ReadOnly}
	isDevice, left := w.left[target]
	switch at := w.targets[target]; {
	case at != nil && *at != want, at == nil && left && isDevice != want.device:
		return volume.ErrExists
	}
	w.targets[target] = &want
	delete(w.left, target)
	return nil
}

func (w *world) publishInline() {
	name, target, p := w.publication(volume.ModeMount)
	in, r := pick(w, "pool", pools...), w.sizes()
	was := w.volumes[name] != nil
	want := w.mayCreate(creation{name: name, pool: in, mode: volume.ModeMount, sizes: r, inline: true})
	v := w.volumes[name]
	if want == nil {
		want = w.mayPublish(name, target, p)
		if want != nil && !was {
			delete(w.volumes, name)
		}
	}
	unlock := w.lockTarget(name, target)
	err := w.set.Publications().PublishInline(background, pool.Request{ID: id(name), Pool: poolName(in), Range: r}, p)
	unlock()
	w.answer(err, want, "publish inline %s of %d to %d in %s at %s", name, r.Required, r.Limit, in, target)
	if err == nil {
		w.stamp(name, v)
	}
}

func (w *world) unpublish() {
	name, target := pick(w, "id", ids...), pick(w, "target", targets...)
	want := w.mayUnpublish(name, target)
	unlock, err := w.set.ShareTarget(id(name), w.target(target))
	must.Succeed(w, err)
	err = w.set.Publications().Unpublish(background, id(name), w.target(target))
	unlock()
	w.answer(err, want, "unpublish %s from %s", name, target)
}

// mayUnpublish is the answer to the end of a publication: whatever is there goes,
// unless it is another volume.
func (w *world) mayUnpublish(name, target string) error {
	if at := w.targets[target]; at != nil {
		if owner, _ := w.owner(at.dir); owner != "" && owner != name {
			return volume.ErrInUse
		}
	}
	delete(w.targets, target)
	delete(w.left, target)
	if v := w.volumes[name]; v != nil && v.promise().inline && len(w.published(v, "")) == 0 {
		delete(w.volumes, name)
	}
	return nil
}

func (w *world) expand() {
	name, target, mode, r := pick(w, "id", ids...), pick(w, "target", targets...), pick(w, "mode", volume.ModeMount, volume.ModeBlock, ""), w.sizes()
	bytes, want := w.mayExpand(name, target, mode, r)
	unlock := w.lock(name)
	got, err := w.set.Expand(background, id(name), w.target(target), mode, r)
	unlock()
	w.answer(err, want, "expand %q %s at %s to %d, at most %d", mode, name, target, r.Required, r.Limit)
	if got != bytes {
		w.Fatalf("expanded to %d, want %d", got, bytes)
	}
}

func (w *world) mayExpand(name, target string, mode volume.Mode, r volume.Range) (int64, error) {
	v := w.volumes[name]
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
	case !w.carries(target, v):
		return 0, volume.ErrNotFound
	}
	has := w.bytes(v)
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
	if err != nil || bytes-has > w.available(v.pool) {
		return 0, volume.ErrCannotGrow
	}
	v.record.bytes = bytes
	return bytes, nil
}

// carries reports whether a target carries a volume as what it is.
func (w *world) carries(target string, v *modelVolume) bool {
	at := w.targets[target]
	return at != nil && at.dir == v.dir
}

func (w *world) stats() {
	name, target := pick(w, "id", ids...), pick(w, "target", targets...)
	v, want := w.volumes[name], error(nil)
	if v == nil || v.dir != nil && !w.carries(target, v) {
		want = volume.ErrNotFound
	}
	got, err := w.set.Publications().Stats(background, id(name), w.target(target))
	w.answer(err, want, "stats of %s at %s", name, target)
	if err != nil {
		return
	}
	if abnormal := v.torn || v.dir == nil; got.Condition.Abnormal != abnormal {
		w.Fatalf("stats %+v, want an abnormal condition: %v", got, abnormal)
	}
	size := w.size(v.pool)
	if p := v.promise(); p.kept || p.mode == volume.ModeBlock {
		size = p.bytes
	}
	if v.dir != nil && got.Space.SizeBytes != size {
		w.Fatalf("stats %+v, want the size %d", got, size)
	}
}

func (w *world) list() {
	after, most := pick(w, "after", append([]string{""}, ids...)...), pick(w, "most", 1, 2, 10)
	want := slices.DeleteFunc(w.sorted(), isSnapshot)
	want = want[len(want)-w.countAfter(want, after):]
	var from volume.ID
	if after != "" {
		from = id(after)
	}
	for {
		page, next := w.set.List(background, from, most)
		for _, v := range page {
			if len(want) == 0 || v.ID.String() != want[0] {
				w.Fatalf("after %s comes %s, want %v", from, v.ID, want)
			}
			w.same(v)
			want = want[1:]
		}
		if next == (volume.ID{}) {
			break
		}
		from = next
	}
	if len(want) > 0 {
		w.Fatalf("the list ends before %v", want)
	}
}

func (w *world) countAfter(sorted []string, after string) (n int) {
	for _, name := range sorted {
		if strings.Compare(name, after) > 0 {
			n++
		}
	}
	return n
}

func (w *world) sorted() (names []string) {
	for name := range w.volumes {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// bytes is the size that is reported of a volume.
func (w *world) bytes(v *modelVolume) int64 {
	if v.promised() {
		return v.record.bytes
	}
	return w.size(v.pool)
}
