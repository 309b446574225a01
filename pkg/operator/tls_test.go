package operator

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/rest"
	certutil "k8s.io/client-go/util/cert"
	ctrl "sigs.k8s.io/controller-runtime"
	ctrlconfig "sigs.k8s.io/controller-runtime/pkg/config"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"kubevirt.io/hostpath-provisioner/test/must"
)

func apiServer(profile map[string]any) *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{"tlsSecurityProfile": profile}}}
}

// A running server goes by the profile of the moment, and survives any.
func TestTLSProfileIsFollowed(t *testing.T) {
	policy := NewTLSPolicy("", "")
	dial := serveTLS(t, policy)
	const ofOld = tls.TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA
	steps := []struct {
		name            string
		profile         *unstructured.Unstructured
		old, tls12, any bool
	}{
		{"none", nil, false, true, true},
		{"Old", apiServer(map[string]any{"type": "Old"}), true, true, true},
		{"Modern", apiServer(map[string]any{"type": "Modern"}), false, false, true},
		{"Custom that is empty", apiServer(map[string]any{"type": "Custom"}), false, true, true},
		{"Custom that is null", apiServer(map[string]any{"type": "Custom", "custom": nil}), false, true, true},
		{"Custom", apiServer(map[string]any{"type": "Custom", "custom": map[string]any{"ciphers": []any{"ECDHE-RSA-AES128-SHA"}, "minTLSVersion": "VersionTLS12"}}), true, true, true},
		{"Custom with unknown names", apiServer(map[string]any{"type": "Custom", "custom": map[string]any{"ciphers": []any{"x"}, "minTLSVersion": "y"}}), false, false, true},
		{"of another form", apiServer(map[string]any{"type": 1, "custom": "x"}), false, true, true},
		{"without a type", apiServer(nil), false, true, true},
		{"gone", nil, false, true, true},
	}
	for _, step := range steps {
		policy.set(step.profile)
		for what, try := range map[string]struct {
			config *tls.Config
			want   bool
		}{
			"TLS 1.2 with a suite of Old": {&tls.Config{MaxVersion: tls.VersionTLS12, CipherSuites: []uint16{ofOld}}, step.old},
			"TLS 1.2":                     {&tls.Config{MaxVersion: tls.VersionTLS12, CipherSuites: []uint16{ofOld, tls.TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256}}, step.tls12},
			"any version":                 {&tls.Config{}, step.any},
		} {
			if err := dial(try.config); (err == nil) != try.want {
				t.Errorf("profile %s: %s ends with %v, want it taken: %v", step.name, what, err, try.want)
			}
		}
	}
}

// Each change of the profile has the driver's flags rendered anew, and what changes nothing does not.
func TestTLSProfileThatChangesIsRolledOut(t *testing.T) {
	policy := NewTLSPolicy("", "")
	changed := func() bool {
		select {
		case <-policy.changed:
			return true
		default:
			return false
		}
	}
	policy.set(apiServer(map[string]any{"type": "Intermediate"}))
	if changed() {
		t.Error("Intermediate is what there was")
	}
	policy.set(apiServer(map[string]any{"type": "Modern"}))
	policy.set(apiServer(map[string]any{"type": "Old"}))
	if !changed() || changed() {
		t.Error("two changes that no reconciler has seen are not one event")
	}
}

func TestTLSOverrides(t *testing.T) {
	policy := NewTLSPolicy("", "VersionTLS12")
	policy.set(apiServer(map[string]any{"type": "Modern"}))
	if got := policy.Now().MinVersion; got != tls.VersionTLS12 {
		t.Errorf("the lowest version is %s, want that of the override", tls.VersionName(got))
	}
}

// A replica that waits for the Lease, or that no HostPathProvisioner is for, has servers too. Nothing is deployed before it is known what it has to
// accept: a restart of the operator would replace the driver's pods twice.
func TestTLSProfileIsFollowedFromTheStart(t *testing.T) {
	for name, tt := range map[string]struct {
		profile string
		want    uint16
	}{
		"Modern":        {`{"metadata": {"name": "cluster"}, "spec": {"tlsSecurityProfile": {"type": "Modern"}}}`, tls.VersionTLS13},
		"none":          {"", tls.VersionTLS12},
		"not this kind": {"no kind", tls.VersionTLS12},
	} {
		t.Run(name, func(t *testing.T) {
			r := &Reconciler{TLS: NewTLSPolicy("", ""), Optional: &OptionalKinds{}}
			answer := make(chan struct{})
			manager := waitingManager(t, openShift(t, tt.profile, answer))
			must.Succeed(t, r.Add(manager))
			ctx, stop := context.WithCancel(t.Context())
			done := make(chan error)
			go func() { done <- manager.Start(ctx) }()
			defer func() { stop(); must.Succeed(t, <-done) }()
			if tt.profile != "no kind" {
				soon, end := context.WithTimeout(ctx, 100*time.Millisecond)
				defer end()
				if err := r.kinds.ask(soon); !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("it would be deployed before the profile is known: %v", err)
				}
			}
			close(answer)
			must.Succeed(t, r.kinds.ask(ctx))
			if got := r.TLS.Now().MinVersion; got != tt.want {
				t.Errorf("the lowest version is %s, want %s", tls.VersionName(got), tls.VersionName(tt.want))
			}
		})
	}
}

// openShift is an API server that has nothing but a profile, which it tells once it is to answer.
func openShift(t *testing.T, profile string, answer <-chan struct{}) *rest.Config {
	t.Helper()
	const ofProfiles = "/apis/config.openshift.io/v1"
	answers := map[string]string{
		"/api":  `{"kind": "APIVersions", "versions": ["v1"]}`,
		"/apis": `{"kind": "APIGroupList", "apiVersion": "v1", "groups": []}`,
	}
	if profile != "no kind" {
		answers[ofProfiles] = `{"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": "config.openshift.io/v1",
			"resources": [{"name": "apiservers", "kind": "APIServer", "verbs": ["list", "watch"]}]}`
		answers[ofProfiles+"/apiservers"] = `{"kind": "APIServerList", "apiVersion": "config.openshift.io/v1", "metadata": {"resourceVersion": "1"}, "items": [` + profile + `]}`
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		text, found := answers[req.URL.Path]
		switch {
		case !found:
			http.NotFound(w, req)
			return
		case req.URL.Query().Get("watch") != "":
			http.Error(w, "no watch", http.StatusMethodNotAllowed)
			return
		case req.URL.Path == ofProfiles+"/apiservers":
			<-answer
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, text)
	}))
	t.Cleanup(server.Close)
	return &rest.Config{Host: server.URL}
}

// waitingManager waits for the Lease.
func waitingManager(t *testing.T, api *rest.Config) ctrl.Manager {
	t.Helper()
	scheme, err := Scheme()
	must.Succeed(t, err)
	manager, err := ctrl.NewManager(api, ctrl.Options{
		Scheme: scheme, Metrics: metricsserver.Options{BindAddress: "0"}, HealthProbeBindAddress: "0", Client: ClientOptions(),
		LeaderElection: true, LeaderElectionID: LeaderElection, LeaderElectionNamespace: "storage",
		Controller: ctrlconfig.Controller{SkipNameValidation: new(true)},
	})
	must.Succeed(t, err)
	return manager
}

// serveTLS serves with a policy. It returns a function that makes a connection.
func serveTLS(t *testing.T, policy *TLSPolicy) (dial func(*tls.Config) error) {
	t.Helper()
	certificate, key, err := certutil.GenerateSelfSignedCertKey("localhost", nil, nil)
	must.Succeed(t, err)
	pair, err := tls.X509KeyPair(certificate, key)
	must.Succeed(t, err)
	config := &tls.Config{}
	policy.Configure(config)
	config.Certificates = []tls.Certificate{pair} // after Configure, as controller-runtime does
	listener, err := tls.Listen("tcp", "127.0.0.1:0", config)
	must.Succeed(t, err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			connection, err := listener.Accept()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil {
				_, _ = connection.Write([]byte("."))
				_ = connection.Close()
			}
		}
	}()
	t.Cleanup(func() { _ = listener.Close(); <-done })
	return func(config *tls.Config) error {
		config.InsecureSkipVerify = true
		connection, err := (&tls.Dialer{Config: config}).DialContext(t.Context(), "tcp", listener.Addr().String())
		if err != nil {
			return err
		}
		defer func() { _ = connection.Close() }()
		_, err = io.ReadFull(connection, make([]byte, 1))
		return err
	}
}
