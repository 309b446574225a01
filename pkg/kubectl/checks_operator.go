package kubectl

import (
	"fmt"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// A provisionerObject is a HostPathProvisioner.
type provisionerObject struct {
	metav1.ObjectMeta `json:"metadata"`
	Status            struct {
		Conditions []metav1.Condition `json:"conditions"`
	} `json:"status"`
}

// inOrderIf are the conditions that say how the operator fares, with the status that they are to have.
var inOrderIf = map[string]metav1.ConditionStatus{"Available": metav1.ConditionTrue, "RolledOut": metav1.ConditionTrue, "Degraded": metav1.ConditionFalse}

// OperatorChecks are whether the operator, where it is installed, has done what was asked for.
type operatorChecks struct {
	driver       driverPods
	kinds        kinds
	deployments  []appsv1.Deployment
	provisioners []provisionerObject
}

func (c operatorChecks) operator() (string, []Finding) {
	if !c.kinds.has(provisioners) {
		return "it is not installed", nil
	}
	var problems []Finding
	for _, p := range c.provisioners {
		for _, one := range p.Status.Conditions {
			if want, known := inOrderIf[one.Type]; known && one.Status != want {
				problems = append(problems, Finding{
					Problem: fmt.Sprintf("HostPathProvisioner %s is %s=%s: %s", p.Name, one.Type, one.Status, strings.TrimSuffix(one.Message, ".")),
					Mend:    "See kubectl describe hostpathprovisioner " + p.Name,
				})
			}
		}
	}
	for _, d := range c.deployments {
		for _, one := range d.Spec.Template.Spec.Containers {
			if strings.Contains(one.Image, "hostpath-provisioner-operator") && d.Namespace != c.driver.namespace {
				problems = append(problems, Finding{
					Problem: fmt.Sprintf("it is in the namespace %s and the driver in %s, so that no volume can move to another node", d.Namespace, c.driver.namespace),
					Mend:    "Install both in one namespace: docs/moves.md",
				})
			}
		}
	}
	return fmt.Sprintf("it is installed, with %d HostPathProvisioners in order", len(c.provisioners)), problems
}
