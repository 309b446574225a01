package cases_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"github.com/google/go-cmp/cmp"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"kubevirt.io/hostpath-provisioner/test/cluster"
	"kubevirt.io/hostpath-provisioner/test/cluster/image"
	"kubevirt.io/hostpath-provisioner/test/cluster/process"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// A prometheus is one that answers at an address.
type prometheus struct{ address string }

// operatorManifests is the file that installs the Prometheus operator, and what is in it.
func (s *scene) operatorManifests() (path string, text []byte) {
	s.Helper()
	path = filepath.Join(c.Programs, "prometheus-operator.yaml")
	text, err := os.ReadFile(path)
	must.Succeed(s, err)
	return path, text
}

// installKinds installs the kinds of the Prometheus operator, which go at the end of the test.
func (s *scene) installKinds() {
	s.Helper()
	_, text := s.operatorManifests()
	var kinds []string
	for _, object := range strings.Split(string(text), "\n---\n") {
		if strings.Contains(object, "\nkind: CustomResourceDefinition\n") {
			kinds = append(kinds, object)
		}
	}
	file := filepath.Join(s.TempDir(), "kinds.yaml")
	must.Succeed(s, os.WriteFile(file, []byte(strings.Join(kinds, "\n---\n")), 0o600))
	s.Cleanup(func() { s.kubectl("delete", "--ignore-not-found", "-f", file) })
	// One of them is too large for the annotation of a client-side apply.
	s.kubectl("apply", "--server-side", "-f", file)
	must.Succeed(s, c.Established(s.Context(), "-f", file))
}

// installOperator installs the Prometheus operator, whose image is made here. At the end of the test all of it is gone.
func (s *scene) installOperator() {
	s.Helper()
	s.installKinds()
	manifests, text := s.operatorManifests()
	if err := c.Import(s.Context(), image.Image{
		Name:       s.find(text, `\bimage: (quay\.io/prometheus-operator/prometheus-operator:\S+)`),
		Files:      map[string]string{"/bin/operator": filepath.Join(c.Programs, "operator")},
		Entrypoint: []string{"/bin/operator"},
	}); err != nil {
		s.Fatal(err)
	}
	s.Cleanup(func() {
		s.kubectl("delete", "--ignore-not-found", "-f", manifests)
		// It made this one by itself.
		s.kubectl("delete", "--ignore-not-found", "-n", "kube-system", "service", "kubelet")
		if err := c.Log.Until(context.Background(), long, "the operator to be gone", func(ctx context.Context) (string, error) {
			pods, err := c.Client.CoreV1().Pods("default").List(ctx, metav1.ListOptions{})
			if err != nil || len(pods.Items) == 0 {
				return "", err
			}
			return pods.Items[0].Name, nil
		}); err != nil {
			s.Error(err)
		}
	})
	s.kubectl("apply", "--server-side", "-f", manifests)
}

// startPrometheus has the operator make a configuration for the monitors, of which there are so many, and rules that
// have a label, and runs Debian's Prometheus with it until the end of the test. That is
// built without Kubernetes, so that the targets are given to it.
func (s *scene) startPrometheus(label string, monitors int) prometheus {
	s.Helper()
	program := filepath.Join(c.Programs, "prometheus")
	out, err := exec.CommandContext(s.Context(), program, "--version").CombinedOutput()
	if err != nil {
		s.Fatal(err, string(out))
	}
	key, value, _ := strings.Cut(label, "=")
	s.applyText(strings.NewReplacer(
		"$namespace", s.namespace, "$version", "v"+s.find(out, `version (\d+\.\d+\.\d+)`), "$label", key+": "+value,
	).Replace(prometheusObject))

	dir := s.TempDir()
	s.write(filepath.Join(dir, "prometheus.yaml"), s.configuration(dir, monitors))
	s.write(filepath.Join(dir, "targets.json"), s.targets())
	p := prometheus{address: "127.0.0.1:9090"}
	running, err := process.Start("prometheus", c.Logs, exec.Command(program, "--config.file="+filepath.Join(dir, "prometheus.yaml"),
		"--storage.tsdb.path="+filepath.Join(dir, "data"), "--web.listen-address="+p.address))
	must.Succeed(s, err)
	s.Cleanup(func() {
		if err := running.Kill(); err != nil {
			s.Error(err)
		}
	})
	ctx, cancel := context.WithTimeout(s.Context(), long)
	defer cancel()
	must.Succeed(s, running.UntilReady(ctx, func(ctx context.Context) error { return p.get(ctx, "/-/ready", nil) }))
	return p
}

// The operator is to make the configuration and no pods.
const prometheusObject = `
apiVersion: monitoring.coreos.com/v1
kind: Prometheus
metadata: {name: test, namespace: $namespace}
spec:
  version: $version
  replicas: 0
  evaluationInterval: 1s
  serviceMonitorNamespaceSelector: {}
  serviceMonitorSelector: {matchLabels: {$label}}
  ruleNamespaceSelector: {}
  ruleSelector: {matchLabels: {$label}}
`

// configuration is what the operator has made of all objects, but that targets are in a
// file, and rules in this directory. It makes a first one before it has seen the rules and
// monitors, so this waits until they are in it.
func (s *scene) configuration(dir string, monitors int) any {
	s.Helper()
	var config map[string]any
	var jobs []any
	s.until(fmt.Sprintf("the operator to make a configuration of one rule and %d monitors", monitors), func(ctx context.Context) (string, error) {
		rules, err := c.Client.CoreV1().ConfigMaps(s.namespace).Get(ctx, "prometheus-test-rulefiles-0", metav1.GetOptions{})
		if apierrors.IsNotFound(err) || err == nil && len(rules.Data) == 0 {
			return "no rules", nil
		} else if err != nil {
			return "", err
		}
		secret, err := c.Client.CoreV1().Secrets(s.namespace).Get(ctx, "prometheus-test", metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return "no configuration", nil
		} else if err != nil {
			return "", err
		}
		if config, err = unpack(secret.Data["prometheus.yaml.gz"]); err != nil {
			return "", err
		}
		if jobs, _ = config["scrape_configs"].([]any); len(jobs) != monitors {
			return fmt.Sprintf("%d jobs", len(jobs)), nil
		}
		for name, text := range rules.Data {
			if err := os.WriteFile(filepath.Join(dir, "rules-"+name), []byte(text), 0o600); err != nil {
				return "", err
			}
		}
		return "", nil
	})
	config["rule_files"] = []string{filepath.Join(dir, "rules-*")}
	for _, job := range jobs {
		s.adaptJob(job.(map[string]any), dir)
	}
	return config
}

// adaptJob has a job take its targets from a file, and the token of this namespace instead of that of Prometheus' pod, and ask more
// often than a test could wait for.
func (s *scene) adaptJob(job map[string]any, dir string) {
	s.Helper()
	// What the targets search for instead.
	want := []any{map[string]any{"role": "endpoints", "namespaces": map[string]any{"names": []any{cluster.Namespace}}}}
	if diff := cmp.Diff(want, job["kubernetes_sd_configs"]); diff != "" {
		s.Fatalf("targets are searched for elsewhere (-want +got):\n%s", diff)
	}
	delete(job, "kubernetes_sd_configs")
	job["file_sd_configs"] = []any{map[string]any{"files": []string{filepath.Join(dir, "targets.json")}}}
	job["scrape_interval"], job["scrape_timeout"] = "2s", "2s"
	authorization, _ := job["authorization"].(map[string]any)
	for _, of := range []struct {
		fields map[string]any
		key    string
	}{{job, "bearer_token_file"}, {authorization, "credentials_file"}} {
		if of.fields[of.key] == "/var/run/secrets/kubernetes.io/serviceaccount/token" {
			token := filepath.Join(dir, "token")
			must.Succeed(s, os.WriteFile(token, []byte(s.kubectl("create", "token", "default", "-n", s.namespace)), 0o600))
			of.fields[of.key] = token
		}
	}
}

// unpack reads a configuration as the operator's config reloader does in the pod.
func unpack(packed []byte) (map[string]any, error) {
	reader, err := gzip.NewReader(bytes.NewReader(packed))
	if err != nil {
		return nil, err
	}
	text, err := io.ReadAll(reader)
	if err != nil {
		return nil, err
	}
	filledIn := strings.NewReplacer("$(POD_NAME)", "prometheus-test-0", "$(SHARD)", "0").Replace(string(text))
	var config map[string]any
	return config, yaml.Unmarshal([]byte(filledIn), &config)
}

// endpoints waits until each service of the driver's namespace has endpoints, all of which are ready. They are made a moment after it.
func (s *scene) endpoints() (found []discoveryv1.EndpointSlice) {
	s.Helper()
	s.until("all services to have endpoints", func(ctx context.Context) (string, error) {
		services, err := c.Client.CoreV1().Services(cluster.Namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return "", err
		}
		all, err := c.Client.DiscoveryV1().EndpointSlices(cluster.Namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return "", err
		}
		found = all.Items
		ready := make(map[string]bool)
		for _, slice := range found {
			of := slice.Labels[discoveryv1.LabelServiceName]
			for _, endpoint := range slice.Endpoints {
				if ready[of] = endpoint.Conditions.Ready == nil || *endpoint.Conditions.Ready; !ready[of] {
					return "one of " + of + " is not ready", nil
				}
			}
		}
		for _, service := range services.Items {
			if !ready[service.Name] {
				return service.Name + " has none", nil
			}
		}
		return "", nil
	})
	return found
}

// targets are the endpoints of all services of the driver's namespace, with the labels by
// which Prometheus knows them before they are relabelled:
// https://prometheus.io/docs/prometheus/latest/configuration/configuration/#kubernetes_sd_config
func (s *scene) targets() any {
	s.Helper()
	var found []any
	for _, slice := range s.endpoints() {
		service, err := c.Client.CoreV1().Services(cluster.Namespace).Get(s.Context(), slice.Labels[discoveryv1.LabelServiceName], metav1.GetOptions{})
		must.Succeed(s, err)
		for _, endpoint := range slice.Endpoints {
			for _, port := range slice.Ports {
				labels := map[string]string{
					"namespace": service.Namespace, "service_name": service.Name,
					"endpoint_port_name": *port.Name, "endpoint_address_target_kind": endpoint.TargetRef.Kind,
					"endpoint_address_target_name": endpoint.TargetRef.Name, "endpoint_ready": "true",
					"pod_name": endpoint.TargetRef.Name, "pod_node_name": *endpoint.NodeName,
					"pod_container_name": "driver", "pod_phase": "Running",
				}
				for name, value := range service.Labels {
					name = regexp.MustCompile(`\W`).ReplaceAllString(name, "_")
					labels["service_label_"+name], labels["service_labelpresent_"+name] = value, "true"
				}
				meta := map[string]string{}
				for name, value := range labels {
					meta["__meta_kubernetes_"+name] = value
				}
				found = append(found, map[string]any{
					"targets": []string{net.JoinHostPort(endpoint.Addresses[0], strconv.Itoa(int(*port.Port)))}, "labels": meta,
				})
			}
		}
	}
	return found
}

// write writes JSON, which is YAML too.
func (s *scene) write(path string, content any) {
	s.Helper()
	text, err := json.Marshal(content)
	must.Succeed(s, err)
	must.Succeed(s, os.WriteFile(path, text, 0o600))
}

// find is what a pattern has in parentheses.
func (s *scene) find(in []byte, pattern string) string {
	s.Helper()
	found := regexp.MustCompile(pattern).FindSubmatch(in)
	if found == nil {
		s.Fatalf("no %s in %.2000s", pattern, in)
	}
	return string(found[1])
}

// kubectl runs kubectl, also at the end of a test.
func (s *scene) kubectl(args ...string) string {
	s.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), long)
	defer cancel()
	out, err := c.Kubectl(ctx, args...)
	must.Succeed(s, err)
	return out
}

// apply applies what kubectl takes by these arguments, and deletes it at the end of the test.
func (s *scene) apply(args ...string) {
	s.Helper()
	s.Cleanup(func() { s.kubectl(append([]string{"delete", "--ignore-not-found"}, args...)...) })
	s.kubectl(append([]string{"apply"}, args...)...)
}

func (s *scene) applyText(objects string) {
	s.Helper()
	file := filepath.Join(s.TempDir(), "objects.yaml")
	// kubectl of Kubernetes 1.30 takes what begins with a brace for JSON.
	must.Succeed(s, os.WriteFile(file, []byte("---\n"+objects), 0o600))
	s.apply("-f", file)
}

// get asks for a page. Of the API it reads the data into what is given.
func (p prometheus) get(ctx context.Context, path string, into any) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+p.address+path, nil)
	if err != nil {
		return err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s answers %s", path, response.Status)
	}
	if into == nil {
		return nil
	}
	return json.NewDecoder(response.Body).Decode(&struct {
		Data any `json:"data"`
	}{into})
}

// A sample is a series of an answer with its last value.
type sample struct {
	Metric map[string]string `json:"metric"`
	Value  [2]any            `json:"value"`
}

func (p prometheus) query(ctx context.Context, expression string) ([]sample, error) {
	var answer struct {
		Result []sample `json:"result"`
	}
	err := p.get(ctx, "/api/v1/query?query="+url.QueryEscape(expression), &answer)
	return answer.Result, err
}

// A rule is an alert as Prometheus has loaded it.
type rule struct {
	Name      string `json:"name"`
	Health    string `json:"health"`
	LastError string `json:"lastError"`
	State     string `json:"state"`
	Alerts    []struct {
		Labels map[string]string `json:"labels"`
		State  string            `json:"state"`
	} `json:"alerts"`
}

// rules are all rules by their name.
func (p prometheus) rules(ctx context.Context) (map[string]rule, error) {
	var answer struct {
		Groups []struct {
			Rules []rule `json:"rules"`
		} `json:"groups"`
	}
	if err := p.get(ctx, "/api/v1/rules", &answer); err != nil {
		return nil, err
	}
	found := map[string]rule{}
	for _, group := range answer.Groups {
		for _, r := range group.Rules {
			found[r.Name] = r
		}
	}
	return found, nil
}
