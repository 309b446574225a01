package model

import (
	"encoding/json"
	"os"
	"strings"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// hand is a change that an administrator makes, or a disk. Then time passes, or the
// driver is started anew.
func (h *harness) hand() {
	name := pick(h, "id", entryIDs...)
	change := pick(h, "change", "move out", "move in", "bring in", "drop the record", "tear the record", "repair the record")
	done := map[string]func(string, *modelVolume) bool{
		"move out":          h.moveOut,
		"move in":           h.moveIn,
		"bring in":          h.bringIn,
		"drop the record":   h.dropRecord,
		"tear the record":   h.tearRecord,
		"repair the record": h.repairRecord,
	}[change](name, h.volumes[name])
	if !done {
		h.Skip()
	}
	h.Logf("by hand: %s of %s", change, name)
	// What is in a record is read when the driver starts, and by calls on the volume.
	if change == "tear the record" || h.flip("restart") {
		h.restart()
		return
	}
	h.wait()
}

func (h *harness) moveOut(name string, v *modelVolume) bool {
	// A mark of another node's eyes would go with it.
	if v == nil || v.dir == nil || h.outside[name] != nil || v.pool == shared && len(h.published(v, "")) > 0 {
		return false
	}
	must.Succeed(h, os.Rename(h.entry(name, v), h.out(v.pool, name)))
	h.outside[name] = &modelVolume{pool: v.pool, dir: v.dir}
	if v.dir = nil; v.record == nil {
		delete(h.volumes, name)
	}
	return true
}

func (h *harness) moveIn(name string, v *modelVolume) bool {
	from := h.outside[name]
	if from == nil || v != nil && (v.dir != nil || v.pool != from.pool) {
		return false
	}
	must.Succeed(h, os.Rename(h.out(from.pool, name), h.entry(name, from)))
	delete(h.outside, name)
	if v == nil {
		v = &modelVolume{pool: from.pool}
		h.volumes[name] = v
	}
	v.dir = from.dir
	if v.record != nil && v.record.mode == volume.ModeBlock && !v.dir.disk {
		h.Fatalf("%s came back as something else", name)
	}
	return true
}

func (h *harness) bringIn(name string, v *modelVolume) bool {
	in, bytes := pick(h, "pool", pools...), pick(h, "bytes", 0, mib, 20*mib)
	if _, free := h.space(in); v != nil || isSnapshot(name) || free < int64(bytes)+mib {
		return false
	}
	v = &modelVolume{pool: in, dir: &directory{}}
	hidden := h.path(in, ".copying")
	must.Succeed(h, os.Mkdir(hidden, 0o755))
	must.Succeed(h, os.WriteFile(hidden+"/data", make([]byte, bytes), 0o600))
	must.Succeed(h, os.Rename(hidden, h.path(in, name)))
	h.volumes[name] = v
	h.stamp(name, v)
	return true
}

func (h *harness) recordPath(name string, v *modelVolume) string {
	return h.own(v.pool, "volumes", name+".json")
}

func (h *harness) dropRecord(name string, v *modelVolume) bool {
	if v == nil || v.record == nil {
		return false
	}
	must.Succeed(h, os.Remove(h.recordPath(name, v)))
	if v.record, v.torn = nil, false; v.dir == nil {
		delete(h.volumes, name)
	}
	return true
}

func (h *harness) tearRecord(name string, v *modelVolume) bool {
	if v == nil || !v.promised() {
		return false
	}
	whole := must.Value(os.ReadFile(h.recordPath(name, v)))(h)
	h.records[name] = whole
	must.Succeed(h, os.Truncate(h.recordPath(name, v), int64(len(whole)/2)))
	v.torn = true
	return true
}

func (h *harness) repairRecord(name string, v *modelVolume) bool {
	if v == nil || !v.torn {
		return false
	}
	must.Succeed(h, os.WriteFile(h.recordPath(name, v), h.records[name], 0o600))
	v.torn = false
	return true
}

// crash ends the driver between two steps of a call that is not answered: the disk is
// brought to what is there then.
func (h *harness) crash() {
	during := pick(h, "during", "creating", "record", "create", "delete", "expand", "publish", "attach")
	var leave func()
	switch during {
	case "creating", "record":
		name, in := pick(h, "id", entryIDs...), pick(h, "pool", pools...)
		leave = func() { h.crashInCreation(name, in, during == "record") }
	case "publish":
		target, device := pick(h, "target", targets...), h.flip("device")
		if _, left := h.left[target]; left || h.targets[target] != nil {
			h.Skip()
		}
		leave = func() { h.crashInPublish(target, device) }
	default:
		name := pick(h, "volume", h.unused(during)...)
		leave = func() { h.crashIn(during, name, h.volumes[name]) }
	}
	must.Succeed(h, h.set.Close(background))
	h.Logf("crash in %s", during)
	leave()
	h.start()
}

// unused are the volumes and snapshots that calls of that kind can be at work on.
func (h *harness) unused(during string) (names []string) {
	for _, name := range h.sorted() {
		v := h.volumes[name]
		if isSnapshot(name) && during != "create" && during != "delete" {
			continue
		}
		if v.dir != nil && v.promised() && len(h.published(v, "")) == 0 && (during != "attach" || v.record.mode == volume.ModeBlock) {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		h.Skip()
	}
	return names
}

func (h *harness) crashIn(during, name string, v *modelVolume) {
	switch during {
	case "create":
		must.Succeed(h, os.Rename(h.entry(name, v), h.own(v.pool, "creating", nodeName, name)))
		delete(h.volumes, name)
	case "delete":
		must.Succeed(h, os.Rename(h.entry(name, v), h.own(v.pool, "trash", nodeName, name+"."+h.fields(name, v)["uid"].(string))))
		delete(h.volumes, name)
	case "expand":
		h.crashInExpand(name, v)
	case "attach":
		h.attach(name, v)
	}
}

// crashInCreation leaves what a creation has made aside, with its record or the
// beginning of it.
func (h *harness) crashInCreation(name, in string, recorded bool) {
	must.Succeed(h, os.Mkdir(h.own(in, "creating", nodeName, name), 0o700))
	must.Succeed(h, os.WriteFile(h.own(in, "creating", nodeName, name, "disk.img"), make([]byte, mib), 0o600))
	if recorded {
		must.Succeed(h, os.WriteFile(h.own(in, "volumes", ".new-"+name+".json"), []byte(`{"version":1,"id`), 0o600))
	}
	// A record without a directory is taken for that of this creation.
	if v := h.volumes[name]; v != nil && v.pool == in && v.dir == nil {
		delete(h.volumes, name)
	}
}

// crashInExpand has the new size in the record and not in the limit; a file grows
// before its record, which the start then makes up for.
func (h *harness) crashInExpand(name string, v *modelVolume) {
	v.record.bytes += mib
	if v.record.mode == volume.ModeBlock {
		must.Succeed(h, os.Truncate(h.path(v.pool, name, "disk.img"), v.record.bytes))
		return
	}
	h.setField(name, v, "bytes", v.record.bytes)
}

func (h *harness) crashInPublish(target string, device bool) {
	h.left[target] = device
	if device {
		must.Succeed(h, os.WriteFile(h.pod(target), nil, 0o600))
		return
	}
	must.Succeed(h, os.Mkdir(h.pod(target), 0o750))
}

func (h *harness) attach(name string, v *modelVolume) {
	d, err := dir.Open(h.path(v.pool, name))
	must.Succeed(h, err)
	defer func() { must.Succeed(h, d.Close()) }()
	file, err := loop.Open(d, "disk.img")
	must.Succeed(h, err)
	defer func() { must.Succeed(h, file.Close()) }()
	_, err = h.loops.Attach(file, loop.Options{})
	must.Succeed(h, err)
}

func (h *harness) fields(name string, v *modelVolume) (fields map[string]any) {
	data := must.Value(os.ReadFile(h.recordPath(name, v)))(h)
	decoder := json.NewDecoder(strings.NewReader(string(data)))
	decoder.UseNumber()
	must.Succeed(h, decoder.Decode(&fields))
	return fields
}

func (h *harness) setField(name string, v *modelVolume, key string, value any) {
	fields := h.fields(name, v)
	fields[key] = value
	data := must.Value(json.Marshal(fields))(h)
	must.Succeed(h, os.WriteFile(h.recordPath(name, v), data, 0o600))
}
