package release_test

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"maps"
	"math/big"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"sigs.k8s.io/yaml"

	"kubevirt.io/hostpath-provisioner/test/cluster"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// A serviceVersion is what is used here of a ClusterServiceVersion.
type serviceVersion struct {
	Spec struct {
		Install struct {
			Spec struct {
				Permissions, ClusterPermissions []struct {
					ServiceAccountName string
					Rules              []rbacv1.PolicyRule
				}
				Deployments []struct {
					Name string
					Spec appsv1.DeploymentSpec
				}
			}
		}
		WebhookDefinitions []map[string]any
	}
}

// asHCO writes the objects that the Operator Lifecycle Manager (OLM) makes of what HCO takes into its ClusterServiceVersion: the output
// of csv-generator, which is the operator by another name. It returns the way to install them.
func asHCO(t *testing.T, l *trial) way {
	t.Helper()
	dir := t.TempDir()
	text, err := os.ReadFile(filepath.Join(l.release, "hostpath-provisioner-operator.yaml"))
	must.Succeed(t, err)
	image := regexp.MustCompile(`image: (\S+/hostpath-provisioner-operator:\S+)`).FindStringSubmatch(string(text))
	if image == nil {
		t.Fatal("hostpath-provisioner-operator.yaml has no image of the operator")
	}
	driver := strings.Replace(image[1], "hostpath-provisioner-operator", "hostpath-csi-driver", 1)
	program := filepath.Join(dir, "csv-generator")
	l.shell(t, "tar -xzOf hostpath-provisioner-*-linux-"+runtime.GOARCH+".tar.gz --wildcards '*/hostpath-provisioner-operator' >"+program+" && chmod 755 "+program)
	out, err := exec.CommandContext(t.Context(), program, "--csv-version=1.19.0", "--namespace="+cluster.Namespace, "--pull-policy=IfNotPresent",
		"--operator-image-name="+image[1], "--csi-driver-image-name="+driver, "--dump-crds").Output()
	must.Succeed(t, err)
	var version serviceVersion
	objects := []any{}
	for _, document := range bytes.Split(out, []byte("\n---\n")) {
		var object map[string]any
		must.Succeed(t, yaml.Unmarshal(document, &object))
		if object["kind"] == "ClusterServiceVersion" {
			must.Succeed(t, yaml.Unmarshal(document, &version))
		} else if len(object) > 0 {
			objects = append(objects, object)
		}
	}
	file, second := filepath.Join(dir, "installed.yaml"), filepath.Join(dir, "second.yaml")
	writeYAML(t, file, append(objects, version.installed(t)...))
	writeYAML(t, second, []any{map[string]any{
		"apiVersion": "hostpathprovisioner.kubevirt.io/v1beta1", "kind": "HostPathProvisioner", "metadata": named("second"),
		"spec": map[string]any{"storagePools": []any{map[string]any{"name": "other", "path": "/var/other"}}},
	}})
	return way{
		name: "as HCO has it",
		install: []string{
			"kubectl apply --server-side -f namespace.yaml -f " + file,
			"kubectl apply -f hostpathprovisioner-snapshots.yaml",
		},
		// The webhook answers, by the certificate that OLM mounts.
		change: []string{
			"kubectl --namespace hostpath-provisioner rollout status deployment/hostpath-provisioner-operator --timeout=2m",
			"if kubectl create -f " + second + "; then exit 1; fi",
		},
		remove: []string{"kubectl delete -f hostpathprovisioner-snapshots.yaml", "kubectl delete -f " + file + " -f namespace.yaml"},
	}
}

func writeYAML(t *testing.T, path string, objects []any) {
	t.Helper()
	var text bytes.Buffer
	for _, o := range objects {
		one, err := yaml.Marshal(o)
		must.Succeed(t, err)
		text.WriteString("---\n")
		text.Write(one)
	}
	must.Succeed(t, os.WriteFile(path, text.Bytes(), 0o600))
}

func named(name string) map[string]any { return map[string]any{"name": name} }

func inNamespace(name string) map[string]any {
	return map[string]any{"name": name, "namespace": cluster.Namespace}
}

// installed are the objects that OLM makes for all namespaces: accounts with their rights, Deployments with the certificate mounted, its
// Service and Secret, and webhooks under names that it invents.
func (v serviceVersion) installed(t *testing.T) (objects []any) {
	t.Helper()
	install := v.Spec.Install.Spec
	// With AllNamespaces the rights in the namespace count everywhere too.
	accounts := map[string]bool{}
	for n, permissions := range append(install.Permissions, install.ClusterPermissions...) {
		account, role := permissions.ServiceAccountName, permissions.ServiceAccountName+".v1.19.0-"+string(rune('a'+n))
		if !accounts[account] {
			objects = append(objects, map[string]any{"apiVersion": "v1", "kind": "ServiceAccount", "metadata": inNamespace(account)})
		}
		accounts[account] = true
		objects = append(objects,
			map[string]any{"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": named(role), "rules": permissions.Rules},
			map[string]any{
				"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": named(role),
				"roleRef":  map[string]any{"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
				"subjects": []any{map[string]any{"kind": "ServiceAccount", "name": account, "namespace": cluster.Namespace}},
			})
	}
	for _, d := range install.Deployments {
		service := d.Name + "-service"
		certificate, key := certificateFor(t, service+"."+cluster.Namespace+".svc")
		mountCertificate(&d.Spec.Template.Spec, service+"-cert")
		objects = append(objects,
			map[string]any{
				"apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/tls", "metadata": inNamespace(service + "-cert"),
				"stringData": map[string]any{"tls.crt": certificate, "tls.key": key},
			},
			map[string]any{"apiVersion": "apps/v1", "kind": "Deployment", "metadata": inNamespace(d.Name), "spec": d.Spec})
		hooks := v.Spec.WebhookDefinitions
		if len(hooks) == 0 {
			t.Fatal("there is no webhook")
		}
		for _, hook := range hooks {
			objects = append(objects, configured(hook, service, certificate))
		}
		objects = append(objects, map[string]any{
			"apiVersion": "v1", "kind": "Service", "metadata": inNamespace(service),
			"spec": map[string]any{
				"selector": d.Spec.Selector.MatchLabels,
				"ports":    []any{map[string]any{"port": hooks[0]["containerPort"], "targetPort": hooks[0]["targetPort"]}},
			},
		})
	}
	return objects
}

// mountCertificate is what OLM adds to a Deployment that has webhooks: the certificate at both of its places.
func mountCertificate(pod *corev1.PodSpec, secret string) {
	for name, at := range map[string]struct{ path, certificate, key string }{
		"apiservice-cert": {"/apiserver.local.config/certificates", "apiserver.crt", "apiserver.key"},
		"webhook-cert":    {"/tmp/k8s-webhook-server/serving-certs", "tls.crt", "tls.key"},
	} {
		pod.Volumes = append(pod.Volumes, corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{
			SecretName: secret,
			Items:      []corev1.KeyToPath{{Key: "tls.crt", Path: at.certificate}, {Key: "tls.key", Path: at.key}},
		}}})
		for i := range pod.Containers {
			pod.Containers[i].VolumeMounts = append(pod.Containers[i].VolumeMounts, corev1.VolumeMount{Name: name, MountPath: at.path})
		}
	}
}

// configured is the configuration of a webhook under a generated name.
func configured(definition map[string]any, service, certificate string) map[string]any {
	hook := maps.Clone(definition)
	hook["name"] = hook["generateName"]
	hook["clientConfig"] = map[string]any{
		"caBundle": []byte(certificate),
		"service":  map[string]any{"name": service, "namespace": cluster.Namespace, "path": hook["webhookPath"], "port": hook["containerPort"]},
	}
	kind := strings.TrimSuffix(hook["type"].(string), "AdmissionWebhook") + "WebhookConfiguration"
	name := hook["generateName"].(string) + "-x7k2p"
	for _, key := range []string{"generateName", "type", "deploymentName", "containerPort", "targetPort", "webhookPath"} {
		delete(hook, key)
	}
	return map[string]any{"apiVersion": "admissionregistration.k8s.io/v1", "kind": kind, "metadata": named(name), "webhooks": []any{hook}}
}

// certificateFor makes one that signs itself, as PEM, with its key.
func certificateFor(t *testing.T, host string) (certificate, key string) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must.Succeed(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), DNSNames: []string{host}, NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	made, err := x509.CreateCertificate(rand.Reader, template, template, private.Public(), private)
	encoded, keyErr := x509.MarshalPKCS8PrivateKey(private)
	must.Succeed(t, errors.Join(err, keyErr))
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: made})), string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: encoded}))
}
