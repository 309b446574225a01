package main

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"image"
	"image/color"
	"image/png"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
)

const monitoring = "../../deploy/monitoring"

func TestMain(m *testing.M) { testenv.Main(m) }

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// asked are the metrics of the driver that rules and dashboard ask for.
func asked(t *testing.T) []string {
	t.Helper()
	names := map[string]bool{}
	for _, file := range []string{"prometheusrule.yaml", "dashboard.json"} {
		content, err := os.ReadFile(filepath.Join(monitoring, file))
		must(t, err)
		for _, name := range regexp.MustCompile(`\b(hostpath|go|process)_[a-z_]*[a-z]\b`).FindAllString(string(content), -1) {
			names[name] = true
		}
	}
	return slices.Sorted(maps.Keys(names))
}

// served are the metrics that a driver shows.
func served(ctx context.Context, w *worker) (names []string, err error) {
	transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}
	defer transport.CloseIdleConnections()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+w.address+"/metrics", http.NoBody)
	if err != nil {
		return nil, err
	}
	response, err := transport.RoundTrip(request)
	if err != nil {
		return nil, err
	}
	body, err := io.ReadAll(response.Body)
	for _, m := range regexp.MustCompile(`(?m)^([a-z_]+)[{ ]`).FindAllStringSubmatch(string(body), -1) {
		names = append(names, m[1])
	}
	return names, errors.Join(err, response.Body.Close())
}

// Real drivers at work show all that the alerts and the dashboard ask for.
func TestWhatIsAskedForIsServed(t *testing.T) {
	testenv.NeedRoot(t)
	s, err := setUp(t.Context())
	if errors.Is(err, loopfs.ErrMissing) {
		testenv.Missing(t, err.Error())
	}
	must(t, err)
	defer func() { must(t, s.close()) }()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()

	random := rand.New(rand.NewPCG(1, 1))
	for _, w := range s.workers {
		for range 10 {
			must(t, w.step(ctx, random, 0))
		}
	}
	must(t, s.workers[1].keepTrash(ctx))

	// What a healthy driver does not show, and what it shows for moments: while something waits
	// to be erased.
	seldom := []string{"hostpath_csi_panics_total", "hostpath_pool_trash_oldest_timestamp_seconds"}
	want := slices.DeleteFunc(asked(t), func(name string) bool { return slices.Contains(seldom, name) })
	if len(want) < 20 {
		t.Fatalf("rules and dashboard ask for only %q", want)
	}
	again := time.NewTicker(50 * time.Millisecond)
	defer again.Stop()
	missing := want
	for len(missing) > 0 {
		// The reaper has to find out what it cannot erase.
		select {
		case <-again.C:
		case <-ctx.Done():
			t.Fatalf("no driver serves %q", missing)
		}
		var got []string
		for _, w := range s.workers {
			names, err := served(ctx, w)
			if err != nil {
				t.Fatalf("%v; no driver has served %q", err, missing)
			}
			got = append(got, names...)
		}
		missing = slices.DeleteFunc(slices.Clone(want), func(name string) bool { return slices.Contains(got, name) })
	}
}

// What is wrong with a volume is told by one alert, and by none only where it is the
// pool's, which has one.
func TestEveryReasonHasItsAlert(t *testing.T) {
	rules, err := os.ReadFile(filepath.Join(monitoring, "prometheusrule.yaml"))
	must(t, err)
	selectors := regexp.MustCompile(`hostpath_pool_abnormal_volumes\{reason(=|=~|!~)"([a-z_|]+)"\}`).FindAllStringSubmatch(string(rules), -1)
	alertsOf := func(reason health.Reason) int {
		found := 0
		for _, selector := range selectors {
			if slices.Contains(strings.Split(selector[2], "|"), string(reason)) != (selector[1] == "!~") {
				found++
			}
		}
		return found
	}
	for _, reason := range health.Reasons() {
		want := 1
		if reason == health.PoolNotServing || reason == health.ReadOnly || reason == health.FilesystemErrors {
			want = 0
		}
		if got := alertsOf(reason); got != want {
			t.Errorf("%d alerts fire for volumes because of %s, want %d", got, reason, want)
		}
	}
	if got := alertsOf("what nobody thought of yet"); got != 1 {
		t.Errorf("%d alerts fire for a reason that is new, want 1", got)
	}
}

// Else the picture could not be drawn.
func TestThePageKnowsTheUnitsAndThePanels(t *testing.T) {
	content, err := os.ReadFile(filepath.Join(monitoring, "dashboard.json"))
	must(t, err)
	units, err := page.ReadFile("page/units.js")
	must(t, err)
	script, err := page.ReadFile("page/page.js")
	must(t, err)
	_, list, _ := strings.Cut(string(script), "const kinds = {")
	list, _, _ = strings.Cut(list, "}")

	var dashboard struct {
		Panels []struct {
			Type        string `json:"type"`
			FieldConfig struct {
				Defaults struct {
					Unit string `json:"unit"`
				} `json:"defaults"`
				Overrides []struct {
					Properties []struct {
						ID    string `json:"id"`
						Value any    `json:"value"`
					} `json:"properties"`
				} `json:"overrides"`
			} `json:"fieldConfig"`
		} `json:"panels"`
	}
	must(t, json.Unmarshal(content, &dashboard))
	for _, p := range dashboard.Panels {
		if p.Type == "row" {
			continue
		}
		if !slices.Contains(strings.FieldsFunc(list, func(r rune) bool { return r == ',' || r == ' ' }), p.Type) {
			t.Errorf("the page cannot draw a %s", p.Type)
		}
		wanted := []string{p.FieldConfig.Defaults.Unit}
		for _, o := range p.FieldConfig.Overrides {
			for _, property := range o.Properties {
				if unit, ok := property.Value.(string); ok && property.ID == "unit" {
					wanted = append(wanted, unit)
				}
			}
		}
		for _, unit := range wanted {
			if !regexp.MustCompile(`(?m)^  ` + unit + `[:,]`).Match(units) {
				t.Errorf("the page does not know the unit %q", unit)
			}
		}
	}
}

func TestPrometheusGetsTheRulesThemselves(t *testing.T) {
	got := ruleGroups("kind: PrometheusRule\nspec:\n  groups:\n  - name: a\n    rules:\n    - alert: B\n      expr: |-\n        up\n          == 0\n")
	want := "\ngroups:\n- name: a\n  rules:\n  - alert: B\n    expr: |-\n      up\n        == 0\n"
	if got != want {
		t.Errorf("the rules are %q, want %q", got, want)
	}
}

func TestPrometheusGetsTheLabelsOfTheServiceMonitor(t *testing.T) {
	got := configuration([]*worker{{name: "node-a", address: "127.0.0.1:1"}, {name: "node-b", address: "127.0.0.1:2"}})
	for _, want := range []string{
		"job_name: hostpath-csi-driver\n",
		"- targets: [\"127.0.0.1:1\"]\n    labels: {namespace: hostpath-provisioner, node: node-a, instance: node-a}\n",
		"- targets: [\"127.0.0.1:2\"]\n    labels: {namespace: hostpath-provisioner, node: node-b, instance: node-b}\n",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("%q is missing in\n%s", want, got)
		}
	}
}

func TestAReducedPictureKeepsItsColours(t *testing.T) {
	full := image.NewRGBA(image.Rect(0, 0, 100, 100))
	often, rare := color.RGBA{10, 20, 30, 255}, color.RGBA{250, 0, 0, 255}
	for y := range 100 {
		for x := range 100 {
			full.Set(x, y, often)
			if y < 10 {
				full.Set(x, y, color.RGBA{uint8(x), uint8(y), 200, 255})
			}
		}
	}
	full.Set(7, 70, rare)
	dir := t.TempDir()
	from, to := filepath.Join(dir, "full.png"), filepath.Join(dir, "reduced.png")
	file, err := os.Create(from)
	must(t, err)
	must(t, errors.Join(png.Encode(file, full), file.Close()))
	must(t, reduce(from, to))

	file, err = os.Open(to)
	must(t, err)
	defer file.Close()
	got, err := png.Decode(file)
	must(t, err)
	paletted, ok := got.(*image.Paletted)
	if !ok || len(paletted.Palette) != 256 || got.Bounds() != full.Bounds() {
		t.Fatalf("it is a %T of %v", got, got.Bounds())
	}
	for at, want := range map[image.Point]color.RGBA{{X: 50, Y: 50}: often, {X: 7, Y: 70}: rare} {
		if c := color.RGBAModel.Convert(got.At(at.X, at.Y)); c != want {
			t.Errorf("at %v %v has become %v", at, want, c)
		}
	}
	for y := range 10 {
		for x := range 100 {
			was, is := full.RGBAAt(x, y), color.RGBAModel.Convert(got.At(x, y)).(color.RGBA)
			if distance(was, is) > 50 {
				t.Errorf("%v has become %v", was, is)
			}
		}
	}
}
