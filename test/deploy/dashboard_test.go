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
	Panels []panel `json:"panels"`
}

type panel struct {
	Type       string     `json:"type"`
	Title      string     `json:"title"`
	Datasource datasource `json:"datasource"`
	Targets    []struct {
		Expr       string     `json:"expr"`
		Datasource datasource `json:"datasource"`
	} `json:"targets"`
}

type datasource struct {
	Type string `json:"type"`
	UID  string `json:"uid"`
}

func theDashboard(t *testing.T) dashboard {
	t.Helper()
	var d dashboard
	succeed(t, json.Unmarshal(dashboardJSON(t), &d))
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
			for _, target := range p.Targets {
				if target.Expr = plain.Replace(target.Expr); strings.Contains(target.Expr, "$") {
					t.Errorf("%s has a variable that the dashboard has not", target.Expr)
				}
				wantExisting(t, target.Expr, documented(t))
				for _, source := range []datasource{p.Datasource, target.Datasource} {
					if source.Type != "prometheus" || source.UID != "${datasource}" {
						t.Errorf("it asks %v, not the data source that was chosen", source)
					}
				}
			}
		})
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
