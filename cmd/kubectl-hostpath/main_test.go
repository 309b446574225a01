package main

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kubevirt.io/hostpath-provisioner/pkg/kubectl"
	"kubevirt.io/hostpath-provisioner/test/must"
)

func TestCommandLines(t *testing.T) {
	for line, want := range map[string]request{
		"pools": {command: "pools", atOnce: 2, output: "table", timeout: 30 * time.Second, kubectl: kubectl.Kubectl{Program: "kubectl", Namespace: "hostpath-provisioner"}},
		"-o json volumes --context c --timeout=5s --kubeconfig /k": {
			command: "volumes", atOnce: 2, output: "json", timeout: 5 * time.Second, kubectl: kubectl.Kubectl{Program: "kubectl", Namespace: "hostpath-provisioner", Flags: []string{"--context=c", "--kubeconfig=/k"}},
		},
		"inspect --output=yaml node-a -n storage": {command: "inspect", about: "node-a", atOnce: 2, output: "yaml", timeout: 30 * time.Second, kubectl: kubectl.Kubectl{Program: "kubectl", Namespace: "storage"}},
	} {
		got, err := parse(strings.Fields(line), io.Discard)
		if diff := cmp.Diff(want, got, cmp.AllowUnexported(request{})); err != nil || diff != "" {
			t.Errorf("%s: %v (-want +got):\n%s", line, err, diff)
		}
	}
	for line, want := range map[string]string{
		"":                    "say what to show",
		"drain":               "drain needs the name of a node",
		"move data":           "NAMESPACE/CLAIM",
		"drain a --evict":     "--evict is for move",
		"pools --to=a":        "--to is for move and drain",
		"drain a --at-once=0": "--at-once",
		"drain a --to=a":      "is the node itself",
		"move x/y --force":    "--force is for pods that are evicted",
		"pool":                `"pool" is unknown`,
		"inspect":             "needs the name of a node",
		"pools node-a":        `unexpected "node-a"`,
		"pools -o wide":       `--output is "wide"`,
		"pools --bad":         "not defined",
		"uninstall":           "the files that the operator was installed from",
		"pools -f operator":   "are for uninstall",
	} {
		if _, err := parse(strings.Fields(line), io.Discard); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %s", line, err, want)
		}
	}
}

func TestExitStatus(t *testing.T) {
	for line, want := range map[string]int{"--help": 0, "version": 0, "pools --kubectl=/nowhere/kubectl": failed, "": failed} {
		var out, errs strings.Builder
		if got := run(context.Background(), strings.Fields(line), &out, &errs, false); got != want || want == failed && !strings.HasPrefix(errs.String(), "kubectl hostpath: ") {
			t.Errorf("%q ends with %d, want %d: %s", line, got, want, errs.String())
		}
	}
}

func TestProgressIsForTerminals(t *testing.T) {
	var person, program strings.Builder
	for _, show := range []func(int, int){progress(&person, true), progress(&program, false)} {
		show(0, 2)
		show(1, 2)
		show(2, 2)
	}
	if got := person.String(); got != "\r0 of 2 nodes have answered\r1 of 2 nodes have answered\r\x1b[K" || program.Len() > 0 {
		t.Errorf("a person sees %q, a program %q", got, program.String())
	}
}

// A log has each problem of a drain once, and a line when a move has ended.
func TestProblemsAreLogged(t *testing.T) {
	var log, person strings.Builder
	for out, terminal := range map[*strings.Builder]bool{&log: false, &person: true} {
		show := moving(out, terminal)
		for _, problem := range []string{"", "list volumemoves: refused", "list volumemoves: refused", ""} {
			show(kubectl.Progress{Of: 2, Problem: problem})
		}
		show(kubectl.Progress{Of: 2, Moved: 1})
	}
	if got := log.String(); got != "list volumemoves: refused: it is tried again\n1 of 2 moved\n" || !strings.Contains(person.String(), "0 of 2 moved, and now: list volumemoves: refused") {
		t.Errorf("a log gets %q, a person %q", got, person.String())
	}
}

func TestCompletion(t *testing.T) {
	kubectl := filepath.Join(t.TempDir(), "kubectl")
	const script = `#!/bin/sh
case "$*" in
"--context=test get pods "*storage*hostpath-csi-driver*) echo '{"items":[{"spec":{"nodeName":"node-a","containers":[{"name":"driver"}]}},{"spec":{"nodeName":"node-b","containers":[{"name":"driver"}]}}]}' ;;
*) echo '{"items":[]}' ;;
esac
`
	must.Succeed(t, os.WriteFile(kubectl, []byte(script), 0o700))
	inspect := "--context test -n storage --kubectl=" + kubectl + " inspect "
	for line, want := range map[string]string{
		"":                            "doctor drain inspect move pools uninstall version volumes",
		"vo":                          "volumes",
		"pools ":                      "",
		"pools -o ":                   "json table yaml",
		"pools --output j":            "json",
		"pools --out":                 "--output",
		"pools --timeout ":            "",
		inspect:                       "node-a node-b",
		inspect + "node-b":            "node-b",
		inspect + "node-a ":           "",
		"--kubectl=/nowhere inspect ": "",
	} {
		var out strings.Builder
		if status := complete(context.Background(), strings.Split(line, " "), &out); status != 0 {
			t.Errorf("%q ends with %d", line, status)
		}
		if got := strings.Join(strings.Fields(out.String()), " "); got != strings.TrimSpace(want+" "+noFiles) {
			t.Errorf("%q may become %q, want %q", line, got, want)
		}
	}
	if !completes("/usr/local/bin/kubectl_complete-hostpath") || !completes(`kubectl_complete-hostpath.exe`) || completes("/usr/local/bin/kubectl-hostpath") {
		t.Error("the wrong name completes")
	}
}

// drained is a stand-in for kubectl in whose cluster VolumeMoves succeed at once, and a volume comes to a node when that is cordoned, as that of
// a pod which was scheduled before.
const drained = `#!/bin/sh
cd "$CLUSTER"
all() {
	printf '{"items":['
	between=
	for f in "$1"/*; do
		[ -f "$f" ] && printf '%s' "$between" && cat "$f" && between=,
	done
	printf ']}'
}
case "$*" in
"exec "*) echo '{"version":1}' ;;
*hostpath-csi-driver*) echo '{"items":[{"metadata":{"namespace":"hostpath-provisioner","name":"driver"},"spec":{"nodeName":"node-a","containers":[{"name":"driver"}]},"status":{"containerStatuses":[{"name":"driver","state":{"running":{}}}]}}]}' ;;
"cordon node-a") mv late volumes/ ;;
"get persistentvolumes "*) all volumes ;;
"get volumemoves"*) all moves ;;
"create "*)
	claim=$(sed -n 's/.*"claimName":"\([^"]*\)".*/\1/p')
	rm "volumes/$claim"
	printf '{"metadata":{"namespace":"apps","name":"%s-1","uid":"%s"},"spec":{"claimName":"%s"},"status":{"phase":"Succeeded"}}' "$claim" "$claim" "$claim" | tee "moves/$claim"
	;;
*) echo '{"items":[]}' ;;
esac
`

// drain drains node-a, which has the volume of the claim "first", and gets that of the claim "late". Moves are those that are there.
func drain(t *testing.T, moves map[string]string) (status int, out string) {
	t.Helper()
	cluster := t.TempDir()
	volume := func(claim string) string {
		return `{"metadata":{"name":"pv-` + claim + `"},"spec":{"claimRef":{"namespace":"apps","name":"` + claim + `"},` +
			`"csi":{"driver":"kubevirt.io.hostpath-provisioner","volumeHandle":"pv-` + claim + `"},"nodeAffinity":{"required":{"nodeSelectorTerms":` +
			`[{"matchExpressions":[{"key":"topology.hostpath.csi/node","operator":"In","values":["node-a"]}]}]}}},"status":{"phase":"Bound"}}`
	}
	files := map[string]string{"kubectl": drained, "volumes/first": volume("first"), "late": volume("late")}
	for name, text := range moves {
		files["moves/"+name] = text
	}
	must.Succeed(t, os.Mkdir(filepath.Join(cluster, "volumes"), 0o700), os.Mkdir(filepath.Join(cluster, "moves"), 0o700))
	for name, text := range files {
		must.Succeed(t, os.WriteFile(filepath.Join(cluster, name), []byte(text), 0o700))
	}
	t.Setenv("CLUSTER", cluster)
	var said, errs strings.Builder
	status = run(t.Context(), []string{"drain", "node-a", "--kubectl=" + filepath.Join(cluster, "kubectl")}, &said, &errs, false)
	return status, said.String() + errs.String()
}

// A node is empty when it is said to be drained: what came to it after it was read has moved, too.
func TestDrainMovesWhatComesMeanwhile(t *testing.T) {
	status, out := drain(t, nil)
	if status != 0 || strings.Count(out, "Succeeded") != 2 || !strings.Contains(out, "late") {
		t.Errorf("it ends with %d:\n%s", status, out)
	}
}

// What other moves bring to the node keeps it from being drained.
func TestDrainNamesWhatOtherMovesBring(t *testing.T) {
	status, out := drain(t, map[string]string{
		"comes": `{"metadata":{"namespace":"apps","name":"comes-1","uid":"c"},"spec":{"claimName":"comes"},` +
			`"status":{"phase":"Copying","sourceNode":"node-b","targetNode":"node-a","volume":"pv-comes"}}`,
	})
	if status != abnormal || !strings.Contains(out, "the VolumeMove comes-1 brings it here") {
		t.Errorf("it ends with %d:\n%s", status, out)
	}
}
