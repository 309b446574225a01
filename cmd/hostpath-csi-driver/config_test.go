package main

import (
	"bytes"
	"crypto/tls"
	"errors"
	"flag"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/klog/v2"

	"kubevirt.io/hostpath-provisioner/pkg/version"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// parseQuietly restores klog's state, which its flags change, at the end of the test.
func parseQuietly(t *testing.T, args ...string) (config, error) {
	t.Helper()
	state := klog.CaptureState()
	t.Cleanup(state.Restore)
	return parse(args, io.Discard)
}

// facts are the compared fields of a configuration.
type facts struct {
	Name, Version, Node, Socket, Metrics string
	CertFile, KeyFile                    string
	MinVersion                           uint16
	Pools                                []string
	EachVolume                           bool
}

func (c config) facts() facts {
	f := facts{
		Name:       c.driver.Name,
		Version:    c.driver.Version,
		Node:       c.driver.Node.String(),
		Socket:     c.socket,
		Metrics:    c.metricsAddress,
		CertFile:   c.metricsTLS.CertFile,
		KeyFile:    c.metricsTLS.KeyFile,
		MinVersion: c.metricsTLS.Accepted.MinVersion,
		EachVolume: c.volumeMetrics,
	}
	for _, p := range c.pools {
		f.Pools = append(f.Pools, p.Name.String()+" "+p.Path+" "+p.SnapshotPath)
	}
	return f
}

func TestParse(t *testing.T) {
	workdir, err := os.Getwd()
	must.Succeed(t, err)
	defaults := func(change func(*facts)) facts {
		f := facts{
			Name:       "kubevirt.io.hostpath-provisioner",
			Version:    "v1",
			Node:       "node-a",
			Socket:     "/csi/csi.sock",
			Metrics:    ":8443",
			MinVersion: tls.VersionTLS13,
			Pools:      []string{"legacy /csi-data-dir /snap-dir"},
		}
		change(&f)
		return f
	}
	for name, c := range map[string]struct {
		args []string
		want facts
	}{
		"required flags only":               {[]string{"--nodeid=node-a", "--version=v1"}, defaults(func(*facts) {})},
		"single dashes and separate values": {[]string{"-nodeid", "node-a", "-version", "v1"}, defaults(func(*facts) {})},
		"flags of the upstream KubeVirt operator": {[]string{
			"--drivername=kubevirt.io.hostpath-provisioner", "--v=3", "--endpoint=unix:///csi/csi.sock", "--nodeid=node-a", "--version=v1",
			`--datadir=[{"name":"local","path":"local-data-dir/csi","snapshotPath":"local-data-dir/csi/snapshots","snapshotProvider":"reflink","shared":false}]`,
			"--metrics-tls-version=VersionTLS12",
		}, defaults(func(f *facts) {
			f.Pools = []string{"local " + workdir + "/local-data-dir/csi " + workdir + "/local-data-dir/csi/snapshots"}
			f.MinVersion = tls.VersionTLS12
		})},
		"metrics per volume": {[]string{"--nodeid=node-a", "--version=v1", "--volume-metrics"}, defaults(func(f *facts) { f.EachVolume = true })},
		"several pools": {[]string{"--nodeid=node-a", "--version=v1", `--datadir=[{"name":"a","path":"/a"},{"name":"b","path":"/b/","shared":true}]`},
			defaults(func(f *facts) { f.Pools = []string{"a /a ", "b /b "} })},
		"another name":               {[]string{"--nodeid=node-a", "--version=v1", "--drivername=hostpath.csi.kubevirt.io"}, defaults(func(f *facts) { f.Name = "hostpath.csi.kubevirt.io" })},
		"a socket by its path":       {[]string{"--nodeid=node-a", "--version=v1", "--endpoint=/run/s"}, defaults(func(f *facts) { f.Socket = "/run/s" })},
		"no metrics":                 {[]string{"--nodeid=node-a", "--version=v1", "--metrics-address="}, defaults(func(f *facts) { f.Metrics = "" })},
		"metrics on another address": {[]string{"--nodeid=node-a", "--version=v1", "--metrics-address=[::1]:0"}, defaults(func(f *facts) { f.Metrics = "[::1]:0" })},
		"repeated flag, last wins":   {[]string{"--nodeid=node-b", "--nodeid=node-a", "--version=v1"}, defaults(func(*facts) {})},
		"klog flags":                 {[]string{"--nodeid=node-a", "--version=v1", "-v", "5", "--logtostderr=true", "--vmodule=x=1"}, defaults(func(*facts) {})},
		"end of flags":               {[]string{"--nodeid=node-a", "--version=v1", "--"}, defaults(func(*facts) {})},
		"no version":                 {[]string{"--nodeid=node-a"}, defaults(func(f *facts) { f.Version = version.Of() })},
		"an empty version":           {[]string{"--nodeid=node-a", "--version="}, defaults(func(f *facts) { f.Version = version.Of() })},
		"any version":                {[]string{"--nodeid=node-a", "--version=latest (dirty)"}, defaults(func(f *facts) { f.Version = "latest (dirty)" })},
		"longest driver name":        {[]string{"--nodeid=node-a", "--version=v1", "--drivername=" + strings.Repeat("a", 63)}, defaults(func(f *facts) { f.Name = strings.Repeat("a", 63) })},
		"node name with dots":        {[]string{"--nodeid=node-a.example.com", "--version=v1"}, defaults(func(f *facts) { f.Node = "node-a.example.com" })},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := parseQuietly(t, c.args...)
			must.Succeed(t, err)
			if diff := cmp.Diff(c.want, got.facts()); diff != "" {
				t.Errorf("configuration (-want +got):\n%s", diff)
			}
		})
	}
}

func TestParse_certificateFiles(t *testing.T) {
	cert, key := certificateFiles(t)
	got, err := parseQuietly(t, "--nodeid=node-a", "--version=v1", "--metrics-cert-file="+cert, "--metrics-key-file="+key)
	must.Succeed(t, err)
	if got.metricsTLS.CertFile != cert || got.metricsTLS.KeyFile != key {
		t.Errorf("certificate files are %+v", got.metricsTLS)
	}
}

func TestParseErrors(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "missing")
	cert, key := certificateFiles(t)
	for name, c := range map[string]struct {
		args []string
		says []string
	}{
		"an unknown flag":                  {[]string{"--colour=red"}, []string{"-colour"}},
		"an argument":                      {[]string{"extra"}, []string{`"extra"`}},
		"an argument after --":             {[]string{"--", "--nodeid=x"}, []string{`"--nodeid=x"`}},
		"a flag without its value":         {[]string{"--endpoint"}, []string{"-endpoint"}},
		"a verbosity that is not a number": {[]string{"--v=much"}, []string{"-v", `"much"`}},
		"no node":                          {[]string{"--nodeid="}, []string{"--nodeid", "empty"}},
		"a node that is a path":            {[]string{"--nodeid=a/b"}, []string{"--nodeid", `"a/b"`}},
		"no name":                          {[]string{"--drivername="}, []string{"--drivername", "kubevirt.io.hostpath-provisioner"}},
		"a name with a space":              {[]string{"--drivername=my driver"}, []string{"--drivername", `"my driver"`}},
		"a name that is a path":            {[]string{"--drivername=a/b"}, []string{"--drivername", `"a/b"`}},
		"a name that ends in a dot":        {[]string{"--drivername=a."}, []string{"--drivername", `"a."`}},
		"a name that is too long":          {[]string{"--drivername=" + strings.Repeat("a", 64)}, []string{"--drivername", "63"}},
		"a TCP endpoint":                   {[]string{"--endpoint=tcp://:1"}, []string{"--endpoint", `"tcp://:1"`, "unix:///csi/csi.sock"}},
		"pools that are not JSON":          {[]string{"--datadir=/var/hpvolumes"}, []string{"--datadir", "JSON array"}},
		"pools that are an object":         {[]string{`--datadir={"name":"a","path":"/a"}`}, []string{"--datadir", "JSON array"}},
		"no pools":                         {[]string{"--datadir=[]"}, []string{"--datadir", "no pool"}},
		"a pool without a path":            {[]string{`--datadir=[{"name":"a"}]`}, []string{"--datadir", "pool 1", "path"}},
		"nested pools":                     {[]string{`--datadir=[{"name":"a","path":"/a"},{"name":"b","path":"/a/b"}]`}, []string{"--datadir", `"a"`, `"b"`}},
		"an unknown TLS version":           {[]string{"--metrics-tls-version=TLS13"}, []string{"--metrics-tls-version", `"TLS13"`, "VersionTLS13"}},
		"a certificate without its key":    {[]string{"--metrics-cert-file=" + cert}, []string{"--metrics-cert-file", "--metrics-key-file"}},
		"a key without its certificate":    {[]string{"--metrics-key-file=" + key}, []string{"--metrics-cert-file", "--metrics-key-file"}},
		"a missing certificate":            {[]string{"--metrics-cert-file=" + missing, "--metrics-key-file=" + key}, []string{"--metrics-cert-file", missing}},
		"a missing key":                    {[]string{"--metrics-cert-file=" + cert, "--metrics-key-file=" + missing}, []string{"--metrics-cert-file", missing}},
		"metrics address without a port":   {[]string{"--metrics-address=localhost"}, []string{"--metrics-address", `localhost`, ":8443"}},
		"metrics port out of range":        {[]string{"--metrics-address=:65536"}, []string{"--metrics-address", `:65536`, ":8443"}},
		"metrics port empty":               {[]string{"--metrics-address=127.0.0.1:"}, []string{"--metrics-address", `127.0.0.1:`, ":8443"}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := parseQuietly(t, append([]string{"--nodeid=node-a", "--version=v1"}, c.args...)...)
			wantWords(t, err, c.says...)
			if lines := strings.Count(err.Error(), "\n"); lines > 0 {
				t.Errorf("one problem takes %d lines:\n%v", lines+1, err)
			}
		})
	}
}

func TestParseReportsAllErrors(t *testing.T) {
	pool := filepath.Join(t.TempDir(), "pool")
	_, err := parseQuietly(t,
		"--colour=red", "--v=much", "one", "--shape=round", "two", "--drivername=",
		"--endpoint=tcp://:1", "--metrics-tls-version=1.3", "--metrics-cert-file=/only", "--metrics-address=nowhere",
		`--datadir=[{"name":"a","path":"`+pool+`","snapshotProvider":"magic"},{"name":"a","path":"`+pool+`/in","size":1}]`)
	wantWords(t, err,
		"-colour", `"much"`, `"one"`, "-shape", `"two"`, "--drivername", "--nodeid", "--endpoint", "--metrics-tls-version",
		"--metrics-cert-file", "--metrics-address", "pool 1", `"magic"`, "pool 2", `"size"`, `two pools are named "a"`, "lie one in the other")
	if _, err := os.Stat(pool); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("parse created the pool, or stat failed: %v", err)
	}
}

var flagOfTable = regexp.MustCompile("`--([a-z-]+)`")

// documentedFlags are those of the table in docs/configuration.md, sorted.
func documentedFlags(t *testing.T) []string {
	t.Helper()
	page, err := os.ReadFile("../../docs/configuration.md")
	must.Succeed(t, err)
	_, section, _ := strings.Cut(string(page), "\n## Flags\n")
	section, _, _ = strings.Cut(section, "\n## ")
	var names []string
	for line := range strings.Lines(section) {
		row, isRow := strings.CutPrefix(line, "|")
		if !isRow {
			continue
		}
		first, _, _ := strings.Cut(row, "|")
		for _, m := range flagOfTable.FindAllStringSubmatch(first, -1) {
			names = append(names, m[1])
		}
	}
	slices.Sort(names)
	return names
}

// Each flag that --help prints is in the document, and the other way round. Of klog's, that is only --v.
func TestHelp(t *testing.T) {
	documented := documentedFlags(t)
	ofKlog := flag.NewFlagSet("klog", flag.ContinueOnError)
	klog.InitFlags(ofKlog)
	for _, args := range [][]string{{"--help"}, {"-h"}, {"--unknown", "--help"}, {"--nodeid=a", "extra", "-help"}} {
		state := klog.CaptureState()
		var output bytes.Buffer
		_, err := parse(args, &output)
		state.Restore()
		if !errors.Is(err, flag.ErrHelp) {
			t.Errorf("%q returned %v", args, err)
		}
		var reported []string
		for line := range strings.Lines(output.String()) {
			if name, ok := strings.CutPrefix(line, "  -"); ok {
				reported = append(reported, strings.Fields(name)[0])
			}
		}
		own := slices.DeleteFunc(reported, func(name string) bool { return name != "v" && ofKlog.Lookup(name) != nil })
		if diff := cmp.Diff(documented, slices.Sorted(slices.Values(own))); diff != "" {
			t.Errorf("the flags of docs/configuration.md and those that %q prints differ (-document +program):\n%s", args, diff)
		}
	}
}

// wantWords fails the test unless err contains all words.
func wantWords(t *testing.T, err error, words ...string) {
	t.Helper()
	if err == nil {
		t.Fatalf("no error, want one with %q", words)
	}
	for _, word := range words {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("error lacks %q:\n%v", word, err)
		}
	}
}
