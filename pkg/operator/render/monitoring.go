package render

import (
	"fmt"
	"strings"

	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/hostpath-provisioner/pkg/version"
)

// Monitoring is what Prometheus needs.
type monitoring struct {
	manifests *Manifests
	config    Config
}

// objects are how Prometheus gets at the metrics of the driver and of the operator. They have metricsLabel, by which users of the
// upstream operator select them.
func (m monitoring) objects() []client.Object {
	service := m.manifests.metricsService.DeepCopy()
	service.ObjectMeta = m.config.meta(MetricsService, service.Labels)
	service.Labels[metricsLabel] = "true"
	labels := map[string]string{metricsLabel: "true"}
	service.Spec.Selector = map[string]string{metricsLabel: "true"}
	own := m.manifests.operatorService.DeepCopy()
	own.ObjectMeta = m.config.meta(own.Name, own.Labels)
	own.Labels[metricsLabel] = "true"
	return []client.Object{
		service,
		own,
		&rbacv1.Role{
			ObjectMeta: m.config.meta(monitoringRole, labels),
			Rules: []rbacv1.PolicyRule{{
				APIGroups: []string{""}, Resources: []string{"services", "endpoints", "pods"}, Verbs: []string{"get", "list", "watch"},
			}, {
				APIGroups: []string{"discovery.k8s.io"}, Resources: []string{"endpointslices"}, Verbs: []string{"get", "list", "watch"},
			}},
		},
		&rbacv1.RoleBinding{
			ObjectMeta: m.config.meta(monitoringRole, labels),
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: monitoringRole},
			Subjects: []rbacv1.Subject{{
				Kind: rbacv1.ServiceAccountKind, Name: "prometheus-k8s", Namespace: m.config.MonitoringNamespace,
			}},
		},
	}
}

// serviceMonitor has the Prometheus operator collect the metrics of the driver, or of the operator.
func (m monitoring) serviceMonitor(from *unstructured.Unstructured, name string) *unstructured.Unstructured {
	monitor := from.DeepCopy()
	meta := m.config.meta(name, monitor.GetLabels())
	meta.Labels["openshift.io/cluster-monitoring"] = ""
	meta.Labels[metricsLabel] = "true"
	setMeta(monitor, meta)
	return monitor
}

// prometheusRule has the rules of the driver and those of the operator, for the operator's namespace.
func (m monitoring) prometheusRule() (*unstructured.Unstructured, error) {
	rule := m.manifests.operatorRule.DeepCopy()
	meta := m.config.meta(prometheusRule, rule.GetLabels())
	meta.Labels[metricsLabel] = "true"
	setMeta(rule, meta)
	groups, err := ruleGroups(rule)
	if err != nil {
		return nil, err
	}
	for _, group := range groups {
		for _, one := range rulesOf(group) {
			m.adapt(one)
		}
	}
	of, err := ruleGroups(m.manifests.driverRule.DeepCopy())
	if err != nil {
		return nil, err
	}
	for _, group := range of {
		for _, one := range rulesOf(group) {
			m.relink(one)
		}
	}
	return rule, unstructured.SetNestedSlice(rule.Object, append(groups, of...), "spec", "groups")
}

func ruleGroups(rule *unstructured.Unstructured) ([]any, error) {
	groups, found, err := unstructured.NestedSlice(rule.Object, "spec", "groups")
	if err != nil || !found {
		return nil, fmt.Errorf("the PrometheusRule %s has no groups: %w", rule.GetName(), err)
	}
	return groups, nil
}

func rulesOf(group any) []map[string]any {
	content, _ := group.(map[string]any)
	list, _ := content["rules"].([]any)
	var found []map[string]any
	for _, element := range list {
		if rule, ok := element.(map[string]any); ok {
			found = append(found, rule)
		}
	}
	return found
}

// relink has the runbook of one rule be in the repository of the release.
func (m monitoring) relink(rule map[string]any) {
	annotations, _ := rule["annotations"].(map[string]any)
	if at, ok := annotations["runbook_url"].(string); ok && m.config.Repository != "" {
		annotations["runbook_url"] = strings.Replace(at, version.DefaultRepository, m.config.Repository, 1)
	}
}

// adapt sets the namespace and the runbook of one rule of the operator's.
func (m monitoring) adapt(rule map[string]any) {
	if expression, ok := rule["expr"].(string); ok {
		rule["expr"] = strings.ReplaceAll(expression, "namespace='hostpath-provisioner'", "namespace='"+m.config.Namespace+"'")
	}
	alert, isAlert := rule["alert"].(string)
	annotations, ok := rule["annotations"].(map[string]any)
	if isAlert && ok && m.config.RunbookURL != "" {
		annotations["runbook_url"] = strings.Replace(m.config.RunbookURL, "%s", alert, 1)
		return
	}
	m.relink(rule)
}
