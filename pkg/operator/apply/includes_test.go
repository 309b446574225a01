package apply

import "testing"

func TestIncludes(t *testing.T) {
	object := func(values ...any) map[string]any {
		o := map[string]any{}
		for i := 0; i < len(values); i += 2 {
			o[values[i].(string)] = values[i+1]
		}
		return o
	}
	list := func(values ...any) []any { return values }
	tests := map[string]struct {
		kind       string
		live, want map[string]any
		includes   bool
	}{
		"the same":                              {"Role", object("a", "b"), object("a", "b"), true},
		"another value":                         {"Role", object("a", "c"), object("a", "b"), false},
		"a field is gone":                       {"Role", object(), object("a", "b"), false},
		"a label of a user":                     {"Role", object("labels", object("a", "b", "user", "c")), object("labels", object("a", "b")), true},
		"a right that a user added":             {"Role", object("rules", list(object("verbs", list("get", "delete")))), object("rules", list(object("verbs", list("get")))), false},
		"a rule that a user added":              {"Role", object("rules", list(object("x", "y"), object("x", "z"))), object("rules", list(object("x", "y"))), false},
		"a subject that a user added":           {"RoleBinding", object("subjects", list(object("name", "a"), object("name", "b"))), object("subjects", list(object("name", "a"))), false},
		"alerts that a user emptied":            {"PrometheusRule", object("groups", list()), object("groups", list(object("name", "a"))), false},
		"a default of the server":               {"DaemonSet", object("containers", list(object("name", "a", "defaulted", true))), object("containers", list(object("name", "a"))), true},
		"a container that a user added":         {"DaemonSet", object("containers", list(object("name", "b"), object("name", "a"))), object("containers", list(object("name", "a"))), true},
		"a second mount that a user added":      {"DaemonSet", object("volumeMounts", list(object("name", "a", "mountPath", "/user"), object("name", "a", "mountPath", "/x"))), object("volumeMounts", list(object("name", "a", "mountPath", "/x"))), true},
		"a port that a user renamed":            {"Service", object("ports", list(object("name", "b", "port", 1))), object("ports", list(object("name", "a", "port", 1))), false},
		"a container that changed":              {"DaemonSet", object("containers", list(object("name", "a", "image", "y"))), object("containers", list(object("name", "a", "image", "x"))), false},
		"a container that is gone":              {"DaemonSet", object("containers", list(object("name", "b"))), object("containers", list(object("name", "a"))), false},
		"an argument that a user added":         {"DaemonSet", object("args", list("a", "b")), object("args", list("a")), false},
		"an empty object that the server drops": {"DaemonSet", object(), object("resources", object()), true},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			if got := includes(tt.kind, tt.live, tt.want); got != tt.includes {
				t.Errorf("includes() = %v, want %v", got, tt.includes)
			}
		})
	}
}
