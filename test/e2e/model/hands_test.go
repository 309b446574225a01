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
func (w *world) hand() {
	name := pick(w, "id", entryIDs...)
	change := pick(w, "change", "move out", "move in", "bring in", "drop the record", "tear the record", "repair the record")
	done := map[string]func(string, *modelVolume) bool{
		"move out":          w.moveOut,
		"move in":           w.moveIn,
		"bring in":          w.bringIn,
		"drop the record":   w.dropRecord,
		"tear the record":   w.tearRecord,
		"repair the record": w.repairRecord,
	}[change](name, w.volumes[name])
	if !done {
		w.Skip()
	}
	w.Logf("by hand: %s of %s", change, name)
	// What is in a record is read when the driver starts, and by calls on the volume.
	if change == "tear the record" || w.flip("restart") {
		w.restart()
		return
	}
	w.wait()
}

func (w *world) moveOut(name string, v *modelVolume) bool {
	// A mark of another node's eyes would go with it.
	if v == nil || v.dir == nil || w.outside[name] != nil || v.pool == shared && len(w.published(v, "")) > 0 {
		return false
	}
	must.Succeed(w, os.Rename(w.entry(name, v), w.out(v.pool, name)))
	w.outside[name] = &modelVolume{pool: v.pool, dir: v.dir}
	if v.dir = nil; v.record == nil {
		delete(w.volumes, name)
	}
	return true
}

func (w *world) moveIn(name string, v *modelVolume) bool {
	from := w.outside[name]
	if from == nil || v != nil && (v.dir != nil || v.pool != from.pool) {
		return false
	}
	must.Succeed(w, os.Rename(w.out(from.pool, name), w.entry(name, from)))
	delete(w.outside, name)
	if v == nil {
		v = &modelVolume{pool: from.pool}
		w.volumes[name] = v
	}
	v.dir = from.dir
	if v.record != nil && v.record.mode == volume.ModeBlock && !v.dir.disk {
		w.Fatalf("%s came back as something else", name)
	}
	return true
}

func (w *world) bringIn(name string, v *modelVolume) bool {
	in, bytes := pick(w, "pool", pools...), pick(w, "bytes", 0, mib, 20*mib)
	if _, free := w.space(in); v != nil || isSnapshot(name) || free < int64(bytes)+mib {
		return false
	}
	v = &modelVolume{pool: in, dir: &directory{}}
	hidden := w.path(in, ".copying")
	must.Succeed(w, os.Mkdir(hidden, 0o755))
	must.Succeed(w, os.WriteFile(hidden+"/data", make([]byte, bytes), 0o600))
	must.Succeed(w, os.Rename(hidden, w.path(in, name)))
	w.volumes[name] = v
	w.stamp(name, v)
	return true
}

func (w *world) recordPath(name string, v *modelVolume) string {
	return w.own(v.pool, "volumes", name+".json")
}

func (w *world) dropRecord(name string, v *modelVolume) bool {
	if v == nil || v.record == nil {
		return false
	}
	must.Succeed(w, os.Remove(w.recordPath(name, v)))
	if v.record, v.torn = nil, false; v.dir == nil {
		delete(w.volumes, name)
	}
	return true
}

func (w *world) tearRecord(name string, v *modelVolume) bool {
	if v == nil || !v.promised() {
		return false
	}
	whole, err := os.ReadFile(w.recordPath(name, v))
	must.Succeed(w, err)
	w.records[name] = whole
	must.Succeed(w, os.Truncate(w.recordPath(name, v), int64(len(whole)/2)))
	v.torn = true
	return true
}

func (w *world) repairRecord(name string, v *modelVolume) bool {
	if v == nil || !v.torn {
		return false
	}
	must.Succeed(w, os.WriteFile(w.recordPath(name, v), w.records[name], 0o600))
	v.torn = false
	return true
}

// crash ends the driver between two steps of a call that is not answered: the disk is
// brought to what is there then.
func (w *world) crash() {
	during := pick(w, "during", "creating", "record", "create", "delete", "expand", "publish", "attach")
	var leave func()
	switch during {
	case "creating", "record":
		name, in := pick(w, "id", entryIDs...), pick(w, "pool", pools...)
		leave = func() { w.crashInCreation(name, in, during == "record") }
	case "publish":
		target, device := pick(w, "target", targets...), w.flip("device")
		if _, left := w.left[target]; left || w.targets[target] != nil {
			w.Skip()
		}
		leave = func() { w.crashInPublish(target, device) }
	default:
		name := pick(w, "volume", w.unused(during)...)
		leave = func() { w.crashIn(during, name, w.volumes[name]) }
	}
	must.Succeed(w, w.set.Close(background))
	w.Logf("crash in %s", during)
	leave()
	w.start()
}

// unused are the volumes and snapshots that calls of that kind can be at work on.
func (w *world) unused(during string) (names []string) {
	for _, name := range w.sorted() {
		v := w.volumes[name]
		if isSnapshot(name) && during != "create" && during != "delete" {
			continue
		}
		if v.dir != nil && v.promised() && len(w.published(v, "")) == 0 && (during != "attach" || v.record.mode == volume.ModeBlock) {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		w.Skip()
	}
	return names
}

func (w *world) crashIn(during, name string, v *modelVolume) {
	switch during {
	case "create":
		must.Succeed(w, os.Rename(w.entry(name, v), w.own(v.pool, "creating", nodeName, name)))
		delete(w.volumes, name)
	case "delete":
		must.Succeed(w, os.Rename(w.entry(name, v), w.own(v.pool, "trash", nodeName, name+"."+w.fields(name, v)["uid"].(string))))
		delete(w.volumes, name)
	case "expand":
		w.crashInExpand(name, v)
	case "attach":
		w.attach(name, v)
	}
}

// crashInCreation leaves what a creation has made aside, with its record or the
// beginning of it.
func (w *world) crashInCreation(name, in string, recorded bool) {
	must.Succeed(w, os.Mkdir(w.own(in, "creating", nodeName, name), 0o700))
	must.Succeed(w, os.WriteFile(w.own(in, "creating", nodeName, name, "disk.img"), make([]byte, mib), 0o600))
	if recorded {
		must.Succeed(w, os.WriteFile(w.own(in, "volumes", ".new-"+name+".json"), []byte(`{"version":1,"id`), 0o600))
	}
	// A record without a directory is taken for that of this creation.
	if v := w.volumes[name]; v != nil && v.pool == in && v.dir == nil {
		delete(w.volumes, name)
	}
}

// crashInExpand has the new size in the record and not in the limit; a file grows
// before its record, which the start then makes up for.
func (w *world) crashInExpand(name string, v *modelVolume) {
	v.record.bytes += mib
	if v.record.mode == volume.ModeBlock {
		must.Succeed(w, os.Truncate(w.path(v.pool, name, "disk.img"), v.record.bytes))
		return
	}
	w.setField(name, v, "bytes", v.record.bytes)
}

func (w *world) crashInPublish(target string, device bool) {
	w.left[target] = device
	if device {
		must.Succeed(w, os.WriteFile(w.pod(target), nil, 0o600))
		return
	}
	must.Succeed(w, os.Mkdir(w.pod(target), 0o750))
}

func (w *world) attach(name string, v *modelVolume) {
	d, err := dir.Open(w.path(v.pool, name))
	must.Succeed(w, err)
	defer func() { must.Succeed(w, d.Close()) }()
	file, err := loop.Open(d, "disk.img")
	must.Succeed(w, err)
	defer func() { must.Succeed(w, file.Close()) }()
	_, err = w.loops.Attach(file, loop.Options{})
	must.Succeed(w, err)
}

func (w *world) fields(name string, v *modelVolume) (fields map[string]any) {
	data, err := os.ReadFile(w.recordPath(name, v))
	must.Succeed(w, err)
	decoder := json.NewDecoder(strings.NewReader(string(data)))
	decoder.UseNumber()
	must.Succeed(w, decoder.Decode(&fields))
	return fields
}

func (w *world) setField(name string, v *modelVolume, key string, value any) {
	fields := w.fields(name, v)
	fields[key] = value
	data, err := json.Marshal(fields)
	must.Succeed(w, err)
	must.Succeed(w, os.WriteFile(w.recordPath(name, v), data, 0o600))
}
