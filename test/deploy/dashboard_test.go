package deploy_test

import (
	"encoding/json"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// A dashboard is what is checked of Grafana's JSON.
type dashboard struct {
	UID        string  `json:"uid"`
	Title      string  `json:"title"`
	Panels     []panel `json:"panels"`
	Templating struct {
		List []struct {
			Name  string `json:"name"`
			Type  string `json:"type"`
			Query any    `json:"query"`
		} `json:"list"`
	} `json:"templating"`
}

type panel struct {
	ID         int        `json:"id"`
	Type       string     `json:"type"`
	Title      string     `json:"title"`
	GridPos    gridPos    `json:"gridPos"`
	Datasource datasource `json:"datasource"`
	Targets    []struct {
		RefID      string     `json:"refId"`
		Expr       string     `json:"expr"`
		Legend     string     `json:"legendFormat"`
		Datasource datasource `json:"datasource"`
	} `json:"targets"`
	FieldConfig struct {
		Defaults struct {
			Unit string `json:"unit"`
		} `json:"defaults"`
	} `json:"fieldConfig"`
}

type datasource struct {
	Type string `json:"type"`
	UID  string `json:"uid"`
}

type gridPos struct{ X, Y, W, H int }

func (p gridPos) overlaps(q gridPos) bool {
	return p.X < q.X+q.W && q.X < p.X+p.W && p.Y < q.Y+q.H && q.Y < p.Y+p.H
}

func theDashboard(t *testing.T) dashboard {
	t.Helper()
	var d dashboard
	if err := json.Unmarshal(dashboardJSON(t), &d); err != nil {
		t.Fatal(err)
	}
	return d
}

// plain has the values that Grafana would put for its variables.
var plain = strings.NewReplacer("$__rate_interval", "5m", "$node", ".*", "$pool", ".*")

func TestPanelsQueryExistingMetrics(t *testing.T) {
	for _, p := range theDashboard(t).Panels {
		if p.Type == "row" {
			continue
		}
		t.Run(p.Title, func(t *testing.T) {
			if len(p.Targets) == 0 {
				t.Error("it asks for nothing")
			}
			if !slices.Contains([]string{"stat", "timeseries", "table"}, p.Type) {
				t.Errorf("it is a %s", p.Type)
			}
			if unit := p.FieldConfig.Defaults.Unit; unit == "" {
				t.Error("its numbers have no unit")
			}
			refs := map[string]bool{}
			for _, target := range p.Targets {
				if target.Expr = plain.Replace(target.Expr); strings.Contains(target.Expr, "$") {
					t.Errorf("%s has a variable that the dashboard has not", target.Expr)
				}
				wantExisting(t, target.Expr, documented(t))
				if refs[target.RefID] {
					t.Errorf("two queries are %s", target.RefID)
				}
				refs[target.RefID] = true
				if p.Type == "timeseries" && target.Legend == "" {
					t.Errorf("%s has no legend", target.Expr)
				}
				for _, source := range []datasource{p.Datasource, target.Datasource} {
					if source.Type != "prometheus" || source.UID != "${datasource}" {
						t.Errorf("it asks %v, not the data source that was chosen", source)
					}
				}
			}
		})
	}
}

func TestPanelTitlesAndPositionsAreUnique(t *testing.T) {
	d := theDashboard(t)
	if d.UID == "" || d.Title == "" {
		t.Errorf("the dashboard is %q, %q", d.UID, d.Title)
	}
	for i, p := range d.Panels {
		if p.ID <= 0 || p.Title == "" || p.GridPos.W <= 0 || p.GridPos.H <= 0 || p.GridPos.X+p.GridPos.W > 24 {
			t.Errorf("the panel %d, %q, is at %+v", p.ID, p.Title, p.GridPos)
		}
		for _, q := range d.Panels[:i] {
			if p.ID == q.ID || p.Title == q.Title || p.GridPos.overlaps(q.GridPos) {
				t.Errorf("%d %q at %+v and %d %q at %+v are too much alike", p.ID, p.Title, p.GridPos, q.ID, q.Title, q.GridPos)
			}
		}
	}
}

func TestDashboardVariables(t *testing.T) {
	var got []string
	for _, v := range theDashboard(t).Templating.List {
		got = append(got, v.Name+": "+v.Type)
	}
	if want := []string{"datasource: datasource", "node: query", "pool: query"}; !slices.Equal(got, want) {
		t.Errorf("the variables are %q, want %q", got, want)
	}
}

// A panel says which alert uses the same numbers, and that alert exists.
func TestDashboardAlertsExist(t *testing.T) {
	var known []string
	for _, a := range ruleSets[0].alerts(t) {
		known = append(known, a.Alert)
	}
	named := regexp.MustCompile(`HostPath[A-Za-z]+`).FindAllString(string(dashboardJSON(t)), -1)
	if len(named) == 0 {
		t.Error("the dashboard names no alert")
	}
	for _, name := range named {
		if !slices.Contains(known, name) {
			t.Errorf("there is no alert %s", name)
		}
	}
}
