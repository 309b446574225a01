package webhook

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	"kubevirt.io/hostpath-provisioner/test/must"
)

// A harness is an API server with the webhook configured, and replicas of the operator.
type harness struct {
	t        *testing.T
	api      client.Client
	now      time.Time
	replicas []*Certificates
}

func newHarness(t *testing.T, annotations map[string]string, replicas int) *harness {
	t.Helper()
	configuration := &admissionv1.ValidatingWebhookConfiguration{
		ObjectMeta: metav1.ObjectMeta{Name: Name, UID: "uid of the webhook", Annotations: annotations},
		Webhooks:   []admissionv1.ValidatingWebhook{{Name: webhookName, ClientConfig: byService()}},
	}
	h := &harness{t: t, now: time.Now(), api: fake.NewClientBuilder().WithScheme(clientgoscheme.Scheme).WithObjects(configuration).Build()}
	for range replicas {
		c := NewCertificates(h.api, h.api, "storage")
		c.now = func() time.Time { return h.now }
		c.rotation.lifetime, c.rotation.announced = 30*time.Hour, time.Hour
		h.replicas = append(h.replicas, c)
	}
	return h
}

// byService is how the manifests have the API server call.
func byService() admissionv1.WebhookClientConfig {
	return admissionv1.WebhookClientConfig{Service: &admissionv1.ServiceReference{Namespace: "storage", Name: service, Port: ptr.To[int32](443)}}
}

// path is where the API server calls.
func (h *harness) path() string {
	h.t.Helper()
	configuration := &admissionv1.ValidatingWebhookConfiguration{}
	must.Succeed(h.t, h.api.Get(h.t.Context(), client.ObjectKey{Name: Name}, configuration))
	return ptr.Deref(configuration.Webhooks[0].ClientConfig.Service.Path, "/")
}

// caBundle is what the API server accepts.
func (h *harness) caBundle() []byte {
	h.t.Helper()
	configuration := &admissionv1.ValidatingWebhookConfiguration{}
	must.Succeed(h.t, h.api.Get(h.t.Context(), client.ObjectKey{Name: Name}, configuration))
	return configuration.Webhooks[0].ClientConfig.CABundle
}

// call makes a connection as the API server does, with what it accepted at some moment.
func (h *harness) call(c *Certificates, bundle []byte) error {
	h.t.Helper()
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(bundle)
	config := &tls.Config{}
	c.Configure(config)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must.Succeed(h.t, err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		connection, err := listener.Accept()
		if err != nil {
			return
		}
		server := tls.Server(connection, config)
		_ = server.HandshakeContext(context.Background())
		_ = server.Close()
	}()
	defer func() { _ = listener.Close(); <-done }()
	dialer := &tls.Dialer{Config: &tls.Config{RootCAs: roots, ServerName: service + ".storage.svc", Time: func() time.Time { return h.now }}}
	connection, err := dialer.DialContext(h.t.Context(), "tcp", listener.Addr().String())
	if err != nil {
		return err
	}
	return connection.Close()
}

// When the webhooks are removed with the operator, nothing else removes the Secret.
func TestSecretGoesWithTheWebhooks(t *testing.T) {
	h := newHarness(t, nil, 1)
	must.Succeed(t, h.replicas[0].refresh(t.Context()))
	secret := &corev1.Secret{}
	must.Succeed(t, h.api.Get(t.Context(), client.ObjectKey{Namespace: "storage", Name: Name}, secret))
	want := []metav1.OwnerReference{{APIVersion: "admissionregistration.k8s.io/v1", Kind: "ValidatingWebhookConfiguration", Name: Name, UID: "uid of the webhook"}}
	if diff := cmp.Diff(want, secret.OwnerReferences); diff != "" {
		t.Errorf("the owners (-want +got):\n%s", diff)
	}
}

// Over several lifetimes every replica can be called at every moment, also with what the API server accepted a while ago,
// and also if one replica is behind.
func TestCertificatesAreRenewedWithoutABreak(t *testing.T) {
	h := newHarness(t, nil, 2)
	seen := map[string]bool{}
	var before []byte
	var pathBefore string
	paths := map[string]bool{}
	for step := range 200 {
		for i, c := range h.replicas {
			if i == 1 && step%2 == 1 {
				continue // behind
			}
			must.Succeed(t, c.refresh(t.Context()))
		}
		now := h.caBundle()
		for i, c := range h.replicas {
			for what, bundle := range map[string][]byte{"now": now, "a moment ago": before} {
				if bundle == nil {
					continue
				}
				if err := h.call(c, bundle); err != nil {
					t.Fatalf("step %d: replica %d with the bundle of %s: %v", step, i, what, err)
				}
			}
			for what, path := range map[string]string{"now": h.path(), "a moment ago": pathBefore} {
				if path != "" && !c.accepts(strings.TrimPrefix(path, "/validate/")) {
					t.Fatalf("step %d: replica %d does not answer at the path of %s", step, i, what)
				}
			}
		}
		before, pathBefore = now, h.path()
		paths[pathBefore] = true
		seen[string(h.replicas[0].served.Load().Certificate[0])] = true
		h.now = h.now.Add(40 * time.Minute)
	}
	if len(seen) < 5 || len(paths) < 5 {
		t.Errorf("in %v there were %d certificates and %d paths, of 30h each", 200*40*time.Minute, len(seen), len(paths))
	}
}

// The webhook of claims accepts the same certificates as the other one, once it is there.
func TestCertificatesOfRestores(t *testing.T) {
	h := newHarness(t, nil, 1)
	must.Succeed(t, h.replicas[0].refresh(t.Context()))
	restores := &admissionv1.MutatingWebhookConfiguration{
		ObjectMeta: metav1.ObjectMeta{Name: restoresName},
		Webhooks:   []admissionv1.MutatingWebhook{{Name: restoresWebhook, ClientConfig: byService()}},
	}
	must.Succeed(t, h.api.Create(t.Context(), restores))
	var versions []string
	for range 2 {
		must.Succeed(t, h.replicas[0].refresh(t.Context()))
		must.Succeed(t, h.api.Get(t.Context(), client.ObjectKeyFromObject(restores), restores))
		versions = append(versions, restores.ResourceVersion)
	}
	if err := h.call(h.replicas[0], restores.Webhooks[0].ClientConfig.CABundle); err != nil {
		t.Error(err)
	}
	if path := ptr.Deref(restores.Webhooks[0].ClientConfig.Service.Path, ""); path != strings.Replace(h.path(), "validate", "restores", 1) {
		t.Errorf("the path is %s", path)
	}
	if versions[0] != versions[1] {
		t.Error("it is written again while nothing is due")
	}
}

// The webhook of claims can be called also when the other one was deleted.
func TestCertificatesOfRestoresAlone(t *testing.T) {
	restores := &admissionv1.MutatingWebhookConfiguration{
		ObjectMeta: metav1.ObjectMeta{Name: restoresName},
		Webhooks:   []admissionv1.MutatingWebhook{{Name: restoresWebhook, ClientConfig: byService()}},
	}
	api := fake.NewClientBuilder().WithScheme(clientgoscheme.Scheme).WithObjects(restores).Build()
	h := &harness{t: t, now: time.Now(), api: api}
	c := NewCertificates(api, api, "storage")
	must.Succeed(t, c.refresh(t.Context()))
	must.Succeed(t, api.Get(t.Context(), client.ObjectKeyFromObject(restores), restores))
	if err := h.call(c, restores.Webhooks[0].ClientConfig.CABundle); err != nil {
		t.Error(err)
	}
}

// While nothing is due nothing is written.
func TestCertificatesAreNotRewritten(t *testing.T) {
	h := newHarness(t, nil, 1)
	version := func() string {
		t.Helper()
		must.Succeed(t, h.replicas[0].refresh(t.Context()))
		secret, configuration := &corev1.Secret{}, &admissionv1.ValidatingWebhookConfiguration{}
		err := errors.Join(h.api.Get(t.Context(), client.ObjectKey{Namespace: "storage", Name: Name}, secret),
			h.api.Get(t.Context(), client.ObjectKey{Name: Name}, configuration))
		must.Succeed(t, err)
		return secret.ResourceVersion + " " + configuration.ResourceVersion
	}
	first := version()
	if again := version(); again != first {
		t.Errorf("the versions are %s, before %s", again, first)
	}
}

// What a user damages or deletes is made anew.
func TestDamagedCertificatesAreMadeAnew(t *testing.T) {
	for name, damage := range map[string]func(h *harness) error{
		"the Secret is gone": func(h *harness) error {
			return h.api.Delete(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "storage", Name: Name}})
		},
		"the key is of another":   func(h *harness) error { return h.setSecret(servedKey, []byte("no key")) },
		"the certificate is none": func(h *harness) error { return h.setSecret(servedCertificate, []byte("no certificate")) },
		"the bundle is empty": func(h *harness) error {
			configuration := &admissionv1.ValidatingWebhookConfiguration{}
			if err := h.api.Get(t.Context(), client.ObjectKey{Name: Name}, configuration); err != nil {
				return err
			}
			configuration.Webhooks[0].ClientConfig.CABundle = nil
			return h.api.Update(t.Context(), configuration)
		},
		"time has passed":            func(h *harness) error { h.now = h.now.Add(1000 * time.Hour); return nil },
		"the clock had been ahead":   func(h *harness) error { h.now = h.now.Add(-time.Hour); return nil },
		"the API server's is behind": func(h *harness) error { h.now = h.now.Add(-4 * time.Minute); return nil },
	} {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t, nil, 1)
			must.Succeed(t, h.replicas[0].refresh(t.Context()))
			must.Succeed(t, damage(h))
			must.Succeed(t, h.replicas[0].refresh(t.Context()))
			if err := h.call(h.replicas[0], h.caBundle()); err != nil {
				t.Error(err)
			}
		})
	}
}

func (h *harness) setSecret(key string, value []byte) error {
	secret := &corev1.Secret{}
	if err := h.api.Get(h.t.Context(), client.ObjectKey{Namespace: "storage", Name: Name}, secret); err != nil {
		return err
	}
	secret.Data[key] = value
	return h.api.Update(h.t.Context(), secret)
}

// With the annotation the Secret is cert-manager's: it is read and never written, and so is the bundle.
func TestCertManagerSecretIsNotWritten(t *testing.T) {
	h := newHarness(t, map[string]string{injectAnnotation: "storage/cert"}, 1)
	if err := h.replicas[0].refresh(t.Context()); err == nil {
		t.Error("there is no Secret, and no error")
	}
	data, _, err := h.replicas[0].rotation.step(nil, h.now)
	must.Succeed(t, err)
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "storage", Name: Name}, Data: data}
	must.Succeed(t, h.api.Create(t.Context(), secret))
	h.now = h.now.Add(29 * time.Hour) // ours would be renewed
	must.Succeed(t, h.replicas[0].refresh(t.Context()))
	if err := h.call(h.replicas[0], data[servedCertificate]); err != nil {
		t.Error(err)
	}
	if bundle := h.caBundle(); bundle != nil {
		t.Errorf("the bundle is %q", bundle)
	}
	if path := h.path(); path != "/validate/"+ticketOf(data[servedKey]) {
		t.Errorf("the path is %s", path)
	}
}

// Without a configuration nothing is made.
func TestWithoutTheWebhookThereIsNoSecret(t *testing.T) {
	api := fake.NewClientBuilder().WithScheme(clientgoscheme.Scheme).Build()
	must.Succeed(t, NewCertificates(api, api, "storage").refresh(t.Context()))
	secrets := &corev1.SecretList{}
	if err := api.List(t.Context(), secrets); err != nil || len(secrets.Items) > 0 {
		t.Errorf("the Secrets are %v: %v", secrets.Items, err)
	}
}
