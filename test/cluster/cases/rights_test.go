package cases_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"strings"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"

	"kubevirt.io/hostpath-provisioner/test/cluster/audit"
)

// What gives the programs their rights.
var installations = []string{
	"../overlay", "../overlay/provisioner", "../overlay/single-node", "../overlay/migrate", "../overlay/operator", "../../../deploy/devices",
}

// unneeded are the rights, as describe writes them, that no case needs.
var unneeded = regexp.MustCompile(strings.Join([]string{
	// What the operator hands on in roles that it makes, which are in no installation: to the driver's pods, and to Prometheus.
	`operator: use securitycontextconstraints`, `operator: (get|list|watch) (endpoints|endpointslices\.discovery\.k8s\.io)$`,
	// No case has a pathConfig where the kinds of OpenShift are.
	`operator: (patch|delete) (securitycontextconstraints|roles|rolebindings)\.\S+ hostpath-provisioner$`,
	// And none where those of the Prometheus operator are.
	`operator: (patch|delete) services hostpath-provisioner-metrics$`,
	// No case begins with version 0.10 or 0.11 of the upstream operator, which had these.
	`operator: delete \S+ hostpath-provisioner-health-check$`,
	// A program stands in for the health monitor, which reads its events back.
	`health-monitor: (get|watch) events`,
	// No case has an agent say the same of a device for so long that the client's library counts it in one event.
	`local-pv-provisioner: patch events\.events\.k8s\.io`,
	// test/cluster/release uninstalls.
	`operator: delete (hostpathprovisioners|volumemoves)\.hostpathprovisioner\.kubevirt\.io$`,
	// The certificate of the webhook is renewed after months.
	`operator-webhook: update secrets`,
}, "|"))

// A role is one of an installation, with the accounts that have it.
type role struct {
	name string
	// namespace is the only one that it counts in, if any.
	namespace string
	accounts  []string
	rules     []rbacv1.PolicyRule
}

// allows says whether the role allows a request.
func (r role) allows(q audit.Request) bool {
	return slices.Contains(r.accounts, q.Account) && (r.namespace == "" || r.namespace == q.Namespace) &&
		slices.ContainsFunc(r.rules, func(rule rbacv1.PolicyRule) bool { return audit.Allows(rule, q) })
}

// rights says what is wrong with the rights of the programs, after all cases have run: a right that none of them has used
// could be left out, and a request that was denied is one for which a rule is missing.
func rights(ctx context.Context, logs string) error {
	requests, err := audit.Requests(audit.Path(logs))
	if err != nil {
		return err
	}
	var all []role
	for _, installation := range installations {
		found, err := rolesOf(ctx, installation)
		if err != nil {
			return err
		}
		all = append(all, found...)
	}
	problems := denied(all, requests)
	for _, r := range all {
		for _, rule := range r.rules {
			for _, one := range audit.Split(rule) {
				right := describe(r.name, one)
				if !used(r, one, requests) && !handedOn(all, r, one) && !unneeded.MatchString(right) {
					problems = append(problems, errors.New("no case uses "+right))
				}
			}
		}
	}
	return errors.Join(problems...)
}

// Verbs that are needed with another one, and give nothing more: who watches sees what get and list show, and lists where
// the API server does not stream; a server-side apply, which is a patch, creates what is not there.
// https://kubernetes.io/docs/reference/using-api/server-side-apply/#api-implementation
var needed = map[string]string{"get": "watch", "list": "watch", "create": "patch"}

// used says whether an account with a role has sent a request that needs a right.
func used(r role, right rbacv1.PolicyRule, requests []audit.Request) bool {
	with := right
	with.Verbs = append(slices.Clone(right.Verbs), needed[right.Verbs[0]])
	return slices.ContainsFunc(requests, func(q audit.Request) bool {
		return !q.Denied && slices.Contains(r.accounts, q.Account) && audit.Allows(with, q)
	})
}

func describe(role string, rule rbacv1.PolicyRule) string {
	return strings.TrimSpace(fmt.Sprintf("%s: %s %s %s", role, rule.Verbs[0],
		strings.TrimSuffix(rule.Resources[0]+"."+rule.APIGroups[0], "."), strings.Join(rule.ResourceNames, "")))
}

// denied are the requests of accounts with roles that none of these allows. One that is allowed was sent before the API
// server knew the role.
func denied(all []role, requests []audit.Request) []error {
	said := map[string]bool{}
	for _, q := range requests {
		known := slices.ContainsFunc(all, func(r role) bool { return slices.Contains(r.accounts, q.Account) })
		allowed := slices.ContainsFunc(all, func(r role) bool { return r.allows(q) })
		if q.Denied && known && !allowed {
			said[fmt.Sprintf("%s was denied: %s", q.Account, q)] = true
		}
	}
	var problems []error
	for _, text := range slices.Sorted(maps.Keys(said)) {
		problems = append(problems, errors.New(text))
	}
	return problems
}

// handedOn says whether the operator needs a right only because a role that it makes has it: no client may give rights that
// he does not have.
// https://kubernetes.io/docs/reference/access-authn-authz/rbac/#privilege-escalation-prevention-and-bootstrapping
func handedOn(all []role, of role, right rbacv1.PolicyRule) bool {
	if !strings.Contains(of.name, "operator") {
		return false
	}
	request := audit.Request{Verb: right.Verbs[0], Group: right.APIGroups[0], Resource: right.Resources[0], Name: strings.Join(right.ResourceNames, "")}
	return slices.ContainsFunc(all, func(r role) bool {
		return r.name != of.name && slices.ContainsFunc(r.rules, func(rule rbacv1.PolicyRule) bool { return audit.Allows(rule, request) })
	})
}

// rolesOf are the roles of an installation.
func rolesOf(ctx context.Context, installation string) ([]role, error) {
	out, err := c.Kubectl(ctx, "kustomize", installation)
	if err != nil {
		return nil, err
	}
	found := map[string]*role{}
	of := func(kind, namespace, name string) *role {
		key := kind + " " + namespace + "/" + name
		if found[key] == nil {
			found[key] = &role{name: kind + " " + name, namespace: namespace}
		}
		return found[key]
	}
	objects := utilyaml.NewYAMLReader(bufio.NewReader(strings.NewReader(out)))
	for {
		text, err := objects.Read()
		if errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, err
		}
		// A ClusterRole and its binding have the fields of a Role and of its.
		var object struct {
			metav1.TypeMeta   `json:",inline"`
			metav1.ObjectMeta `json:"metadata"`
			Rules             []rbacv1.PolicyRule `json:"rules"`
			RoleRef           rbacv1.RoleRef      `json:"roleRef"`
			Subjects          []rbacv1.Subject    `json:"subjects"`
		}
		if err := yaml.Unmarshal(text, &object); err != nil {
			return nil, err
		}
		switch object.Kind {
		case "Role", "ClusterRole":
			namespace := object.Namespace
			if object.Kind == "ClusterRole" {
				namespace = ""
			}
			of(object.Kind, namespace, object.Name).rules = object.Rules
		case "RoleBinding", "ClusterRoleBinding":
			namespace := object.Namespace
			if object.RoleRef.Kind == "ClusterRole" {
				namespace = ""
			}
			bound := of(object.RoleRef.Kind, namespace, object.RoleRef.Name)
			for _, subject := range object.Subjects {
				bound.accounts = append(bound.accounts, subject.Namespace+"/"+subject.Name)
			}
		}
	}
	var all []role
	for _, key := range slices.Sorted(maps.Keys(found)) {
		all = append(all, *found[key])
	}
	return all, nil
}
