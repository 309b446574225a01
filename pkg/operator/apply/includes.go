package apply

import (
	"reflect"
	"slices"
)

// listKeys are the fields that identify elements of lists to which several parties add: those of pods
// and services, which are the kinds where users add some of their own. A name is the last: two mounts of one volume have the same.
var listKeys = []string{"mountPath", "devicePath", "containerPort", "port", "uid", "name"}

// mergedKinds are those with such lists. The lists of all other kinds are owned whole, as are rules and subjects.
var mergedKinds = []string{"DaemonSet", "Deployment", "Job", "Service", "PersistentVolumeClaim"}

// includes says whether a live object has all that is wanted of it. What users or the API server added is ignored,
// but not in a list that is owned whole.
func includes(kind string, live, want map[string]any) bool {
	c := comparison{merged: slices.Contains(mergedKinds, kind)}
	return c.object(live, want)
}

type comparison struct{ merged bool }

func (c comparison) value(live, want any) bool {
	switch want := want.(type) {
	case map[string]any:
		live, ok := live.(map[string]any)
		return (ok || len(want) == 0) && c.object(live, want)
	case []any:
		live, _ := live.([]any)
		return c.list(live, want)
	default:
		return reflect.DeepEqual(live, want)
	}
}

func (c comparison) object(live, want map[string]any) bool {
	for key, value := range want {
		if !c.value(live[key], value) {
			return false
		}
	}
	return true
}

func (c comparison) list(live, want []any) bool {
	if key := keyOf(want); c.merged && key != "" {
		for _, element := range want {
			if i := slices.IndexFunc(live, func(l any) bool { return sameKey(key, l, element) }); i < 0 || !c.value(live[i], element) {
				return false
			}
		}
		return true
	}
	if len(live) != len(want) {
		return false
	}
	for i := range want {
		equal := c.value
		if !c.merged {
			equal = reflect.DeepEqual
		}
		if !equal(live[i], want[i]) {
			return false
		}
	}
	return true
}

// keyOf is the field that all elements of a list have and differ in, or empty.
func keyOf(list []any) string {
	for _, key := range listKeys {
		seen := map[any]bool{}
		for _, element := range list {
			object, ok := element.(map[string]any)
			if value, has := object[key]; ok && has && reflect.TypeOf(value).Comparable() {
				seen[value] = true
			}
		}
		if len(list) > 0 && len(seen) == len(list) {
			return key
		}
	}
	return ""
}

func sameKey(key string, a, b any) bool {
	first, _ := a.(map[string]any)
	second, _ := b.(map[string]any)
	return first != nil && second != nil && reflect.DeepEqual(first[key], second[key])
}
