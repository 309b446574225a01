package operator

import (
	"context"
	"crypto/tls"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime/schema"
	toolscache "k8s.io/client-go/tools/cache"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/event"

	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
	"kubevirt.io/hostpath-provisioner/pkg/tlsprofile"
)

// apiServerKind is that of OpenShift's object which has the TLS profile of the cluster.
var apiServerKind = schema.GroupVersionKind{Group: "config.openshift.io", Version: "v1", Kind: "APIServer"}

const apiServerName = "cluster"

// A TLSPolicy is what the TLS servers of the operator, and of what it deploys, accept at this moment.
type TLSPolicy struct {
	overrides tlsprofile.Settings
	now       atomic.Pointer[tlsprofile.Profile]
	// changed has something in it when the policy has changed since it was last received from.
	changed chan event.GenericEvent
}

// NewTLSPolicy is the policy of a cluster without a profile. The overrides go before any profile.
func NewTLSPolicy(ciphersOverride, minVersionOverride string) *TLSPolicy {
	p := &TLSPolicy{
		overrides: tlsprofile.Settings{CiphersOverride: ciphersOverride, MinVersionOverride: minVersionOverride},
		changed:   make(chan event.GenericEvent, 1),
	}
	p.set(nil)
	return p
}

// Now is what servers accept.
func (p *TLSPolicy) Now() tlsprofile.Profile { return *p.now.Load() }

// Configure has a server follow the policy: each handshake uses the policy of that moment.
func (p *TLSPolicy) Configure(c *tls.Config) {
	// HTTP/2 wants cipher suites of its own, which a profile need not have (RFC 9113, section 9.2.2).
	c.NextProtos = []string{"http/1.1"}
	c.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) {
		now := c.Clone()
		now.GetConfigForClient = nil
		p.Now().Configure(now)
		return now, nil
	}
}

// set takes the profile of an APIServer, or nil where there is none.
func (p *TLSPolicy) set(apiServer *unstructured.Unstructured) {
	settings := p.overrides
	if apiServer != nil {
		// A field of the wrong type counts as missing.
		of := func(path ...string) string {
			text, _, _ := unstructured.NestedString(apiServer.Object, append([]string{"spec", "tlsSecurityProfile"}, path...)...)
			return text
		}
		settings.Type, settings.MinVersion = of("type"), of("custom", "minTLSVersion")
		settings.Ciphers, _, _ = unstructured.NestedStringSlice(apiServer.Object, "spec", "tlsSecurityProfile", "custom", "ciphers")
	}
	profile, problems := settings.Profile()
	if len(problems) > 0 {
		ctrl.Log.Info("Parts of the TLS profile are not usable", "profile", settings.Type, "problems", strings.Join(problems, "; "))
	}
	before := p.now.Swap(&profile)
	if before == nil || before.MinVersion == profile.MinVersion && slices.Equal(before.CipherSuites, profile.CipherSuites) {
		return
	}
	ctrl.Log.Info("The TLS profile has changed", "profile", settings.Type, "least", tls.VersionName(profile.MinVersion))
	select {
	case p.changed <- event.GenericEvent{Object: &hppv1.HostPathProvisioner{}}:
	default: // the one that is there already is enough
	}
}

// profileWithin is how long the API server has to answer what the profile is, before the policy of a cluster without one is taken.
const profileWithin = time.Minute

// A follower has a policy be that of the cluster, on every replica from its start on: also one that waits for the lease, or that there is no
// HostPathProvisioner for, has servers.
type follower struct {
	*TLSPolicy
	manager ctrl.Manager
	// resync is how often a cluster without the kind is asked for it.
	resync time.Duration
	// turn is of who asks.
	turn chan struct{}
	// synced says whether the profile was read; nil before it is watched.
	synced func() bool
}

// NeedLeaderElection implements manager.LeaderElectionRunnable.
func (f *follower) NeedLeaderElection() bool { return false }

// Start follows once the cluster has the kind of the profile.
func (f *follower) Start(ctx context.Context) error {
	for {
		again := f.resync
		followed, err := f.follow(ctx)
		if err != nil && ctx.Err() == nil {
			ctrl.Log.Error(err, "Failed to read the TLS profile of the cluster")
			again = poll
		}
		if followed {
			return nil
		}
		timer := time.NewTimer(again)
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil
		case <-timer.C:
		}
	}
}

// follow watches the APIServer of OpenShift, if the cluster has that kind. It says whether it does, once that was read.
func (f *follower) follow(ctx context.Context) (bool, error) {
	select {
	case f.turn <- struct{}{}:
		defer func() { <-f.turn }()
	case <-ctx.Done():
		return false, ctx.Err()
	}
	if f.synced == nil {
		if err := f.watch(ctx); f.synced == nil || err != nil {
			return false, err
		}
	}
	enough, cancel := context.WithTimeout(ctx, profileWithin)
	defer cancel()
	if !toolscache.WaitForCacheSync(enough.Done(), f.synced) && ctx.Err() == nil {
		ctrl.Log.Info("The TLS profile of the cluster could not be read yet", "policy", "that of a cluster without one")
		f.synced = func() bool { return true }
	}
	return ctx.Err() == nil, ctx.Err()
}

func (f *follower) watch(ctx context.Context) error {
	if _, err := f.manager.GetRESTMapper().RESTMapping(apiServerKind.GroupKind(), apiServerKind.Version); meta.IsNoMatchError(err) {
		return nil
	} else if err != nil {
		return err
	}
	// Not the cache of the manager, which has what carries the operator's labels.
	profiles, err := cache.New(f.manager.GetConfig(), cache.Options{
		HTTPClient: f.manager.GetHTTPClient(), Scheme: f.manager.GetScheme(), Mapper: f.manager.GetRESTMapper(),
		DefaultFieldSelector: fields.OneTermEqualSelector("metadata.name", apiServerName),
	})
	if err != nil {
		return err
	}
	informer, err := profiles.GetInformer(ctx, empty(apiServerKind), cache.BlockUntilSynced(false))
	if err != nil {
		return err
	}
	take := func(object any) {
		if apiServer, ok := object.(*unstructured.Unstructured); ok {
			f.set(apiServer)
		}
	}
	handler, err := informer.AddEventHandler(toolscache.ResourceEventHandlerFuncs{
		AddFunc:    take,
		UpdateFunc: func(_, object any) { take(object) },
		DeleteFunc: func(any) { f.set(nil) },
	})
	if err != nil {
		return err
	}
	if err := f.manager.Add(profiles); err != nil {
		return err
	}
	f.synced = handler.HasSynced
	return nil
}
