// Package audit reads the audit log of the API server: who asked for what, and what was refused.
// https://kubernetes.io/docs/tasks/debug/debug-cluster/audit/
package audit

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"

	rbacv1 "k8s.io/api/rbac/v1"
)

// Policy has the API server record each request of a pod, and none of its own controllers.
const Policy = `
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: None
  userGroups: ["system:serviceaccounts:kube-system"]
- level: Metadata
  userGroups: ["system:serviceaccounts"]
- level: None
`

// Path is where the log is, in the directory of all logs.
func Path(logs string) string { return filepath.Join(logs, "audit.log") }

// A Request is one that a service account has sent, as RBAC sees it.
type Request struct {
	// Account is the service account, as namespace/name.
	Account string
	Verb    string
	Group   string
	// Resource has its subresource after a slash.
	Resource        string
	Namespace, Name string
	// URI has the selectors of a list or watch.
	URI string
	// Denied says that no rule allows it.
	Denied bool
	// Missing says that there was no such object.
	Missing bool
}

func (r Request) String() string {
	of := r.Resource
	if r.Group != "" {
		of += "." + r.Group
	}
	return fmt.Sprintf("%s %s %s", r.Verb, of, strings.Trim(r.Namespace+"/"+r.Name, "/"))
}

// event has what is read of an audit.k8s.io/v1 Event.
type event struct {
	Stage string `json:"stage"`
	Verb  string `json:"verb"`
	URI   string `json:"requestURI"`
	User  struct {
		Username string `json:"username"`
	} `json:"user"`
	Object *struct {
		APIGroup, Resource, Subresource, Namespace, Name string
	} `json:"objectRef"`
	Status struct {
		Code int `json:"code"`
	} `json:"responseStatus"`
	Annotations map[string]string `json:"annotations"`
}

// Requests reads the requests for objects from a log.
func Requests(path string) ([]Request, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	var found []Request
	lines := bufio.NewReader(file)
	for {
		line, err := lines.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			// What follows the last newline is being written.
			return found, nil
		} else if err != nil {
			return nil, err
		}
		var e event
		if err := json.Unmarshal(line, &e); err != nil {
			return nil, fmt.Errorf("%s: %w: %.200s", path, err, line)
		}
		account, ok := strings.CutPrefix(e.User.Username, "system:serviceaccount:")
		// A watch is answered for as long as it goes on.
		if !ok || e.Object == nil || e.Verb == "watch" && e.Stage == "ResponseComplete" && e.Status.Code < http.StatusBadRequest {
			continue
		}
		r := Request{
			Account: strings.Replace(account, ":", "/", 1), Verb: e.Verb,
			Group: e.Object.APIGroup, Resource: e.Object.Resource, Namespace: e.Object.Namespace, Name: e.Object.Name, URI: e.URI,
			Denied:  e.Status.Code == http.StatusForbidden && e.Annotations["authorization.k8s.io/decision"] == "forbid",
			Missing: e.Status.Code == http.StatusNotFound,
		}
		if e.Object.Subresource != "" {
			r.Resource += "/" + e.Object.Subresource
		}
		found = append(found, r)
	}
}

// Writes are those of the requests that change something, but for leases, which are renewed for ever.
func Writes(requests []Request) []Request {
	return slices.DeleteFunc(slices.Clone(requests), func(r Request) bool {
		return slices.Contains([]string{"get", "list", "watch"}, r.Verb) || r.Resource == "leases"
	})
}

// Split splits a rule into rules of one group, resource, verb and name each.
func Split(rule rbacv1.PolicyRule) []rbacv1.PolicyRule {
	names := rule.ResourceNames
	if len(names) == 0 {
		names = []string{""}
	}
	var all []rbacv1.PolicyRule
	for _, group := range rule.APIGroups {
		for _, resource := range rule.Resources {
			for _, verb := range rule.Verbs {
				for _, name := range names {
					one := rbacv1.PolicyRule{APIGroups: []string{group}, Resources: []string{resource}, Verbs: []string{verb}}
					if name != "" {
						one.ResourceNames = []string{name}
					}
					all = append(all, one)
				}
			}
		}
	}
	return all
}

// Allows says whether a rule allows a request. Its namespace is not compared.
func Allows(rule rbacv1.PolicyRule, r Request) bool {
	return slices.Contains(rule.APIGroups, r.Group) && slices.Contains(rule.Resources, r.Resource) && slices.Contains(rule.Verbs, r.Verb) &&
		(len(rule.ResourceNames) == 0 || slices.Contains(rule.ResourceNames, r.Name))
}
