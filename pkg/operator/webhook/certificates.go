package webhook

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	admissionapply "k8s.io/client-go/applyconfigurations/admissionregistration/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

const (
	// Name is that of the Secret and of the ValidatingWebhookConfiguration.
	Name = "hostpath-provisioner-operator-webhook"
	// webhookName is that of the one webhook in it.
	webhookName = "validate.hostpathprovisioner.kubevirt.io"
	// restoresName is that of the MutatingWebhookConfiguration, and restoresWebhook that of the one webhook in it.
	restoresName    = "hostpath-provisioner-operator-restores"
	restoresWebhook = "restores.hostpathprovisioner.kubevirt.io"
	// service is the Service that the API server calls.
	service = "hostpath-provisioner-operator-webhook-service"
	// injectAnnotation has cert-manager make the certificate.
	injectAnnotation = "cert-manager.io/inject-ca-from"

	lifetime  = 90 * 24 * time.Hour
	announced = time.Hour
	// refresh is how often the Secret is read. It is also how long a change by another client stays.
	refresh = 10 * time.Second
)

// Certificates has the certificate that the webhook serves. It makes and renews it, and has the API server know it. It works in
// every replica: what one of them writes, the others take.
type Certificates struct {
	reader    client.Reader
	writer    client.Client
	namespace string
	rotation  rotation
	now       func() time.Time
	served    atomic.Pointer[tls.Certificate]
}

// NewCertificates works on the Secret of a namespace. The reader must not have a cache.
func NewCertificates(reader client.Reader, writer client.Client, namespace string) *Certificates {
	return &Certificates{
		reader: reader, writer: writer, namespace: namespace, now: time.Now,
		rotation: rotation{name: service + "." + namespace + ".svc", lifetime: lifetime, announced: announced},
	}
}

// Configure has a server show the certificate of the moment.
func (c *Certificates) Configure(config *tls.Config) {
	config.GetCertificate = func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
		if served := c.served.Load(); served != nil {
			return served, nil
		}
		return nil, errNoCertificate
	}
}

// NeedLeaderElection says that all replicas do this: all of them serve.
func (c *Certificates) NeedLeaderElection() bool { return false }

// Start keeps the certificate until the context ends. A failure is logged and tried again.
func (c *Certificates) Start(ctx context.Context) error {
	ticker := time.NewTicker(refresh)
	defer ticker.Stop()
	for {
		if err := c.refresh(ctx); err != nil && ctx.Err() == nil {
			ctrl.LoggerFrom(ctx).Error(err, "Failed to refresh the certificate of the webhook")
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

// refresh brings Secret, served certificate and webhook configuration to what they should be. Without a configuration there
// is no webhook, and nothing to do.
func (c *Certificates) refresh(ctx context.Context) error {
	configuration := &admissionv1.ValidatingWebhookConfiguration{}
	if err := c.reader.Get(ctx, client.ObjectKey{Name: Name}, configuration); apierrors.IsNotFound(err) {
		return nil // deploy/operator/webhook is not applied
	} else if err != nil {
		return err
	}
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: c.namespace, Name: Name}}
	err := c.reader.Get(ctx, client.ObjectKeyFromObject(secret), secret)
	if client.IgnoreNotFound(err) != nil {
		return err
	}
	_, elsewhere := configuration.Annotations[injectAnnotation]
	if !elsewhere {
		if err := c.rotate(ctx, secret, apierrors.IsNotFound(err)); err != nil {
			return err
		}
		// The API server knows a certificate before it is served.
		accepted := bundle(secret.Data)
		if err := errors.Join(c.announce(ctx, configuration, accepted), c.announceRestores(ctx, accepted)); err != nil {
			return err
		}
	}
	pair, err := tls.X509KeyPair(secret.Data[servedCertificate], secret.Data[servedKey])
	if err != nil {
		return fmt.Errorf("read the Secret %s/%s: %w", c.namespace, Name, err)
	}
	c.served.Store(&pair)
	return nil
}

// rotate writes what the Secret should have. Of several replicas that do so at the same time one succeeds, and the others
// read what it has written the next time.
func (c *Certificates) rotate(ctx context.Context, secret *corev1.Secret, missing bool) error {
	data, changed, err := c.rotation.step(secret.Data, c.now())
	if err != nil || !changed {
		return err
	}
	secret.Data, secret.Type = data, corev1.SecretTypeTLS
	if missing {
		return c.writer.Create(ctx, secret)
	}
	return c.writer.Update(ctx, secret)
}

// announce writes the certificates that the API server accepts, and no other field of the configuration.
func (c *Certificates) announce(ctx context.Context, live *admissionv1.ValidatingWebhookConfiguration, bundle []byte) error {
	for _, hook := range live.Webhooks {
		if hook.Name != webhookName || bytes.Equal(hook.ClientConfig.CABundle, bundle) {
			continue
		}
		want := admissionapply.ValidatingWebhookConfiguration(Name).WithWebhooks(
			admissionapply.ValidatingWebhook().WithName(webhookName).WithClientConfig(
				admissionapply.WebhookClientConfig().WithCABundle(bundle...)))
		return c.writer.Apply(ctx, want, client.FieldOwner(Name), client.ForceOwnership)
	}
	return nil
}

// announceRestores does the same for the webhook of claims, if deploy/operator/restores is applied.
func (c *Certificates) announceRestores(ctx context.Context, bundle []byte) error {
	live := &admissionv1.MutatingWebhookConfiguration{}
	if err := c.reader.Get(ctx, client.ObjectKey{Name: restoresName}, live); err != nil {
		return client.IgnoreNotFound(err)
	}
	for _, hook := range live.Webhooks {
		if hook.Name != restoresWebhook || bytes.Equal(hook.ClientConfig.CABundle, bundle) {
			continue
		}
		want := admissionapply.MutatingWebhookConfiguration(restoresName).WithWebhooks(
			admissionapply.MutatingWebhook().WithName(restoresWebhook).WithClientConfig(
				admissionapply.WebhookClientConfig().WithCABundle(bundle...)))
		return c.writer.Apply(ctx, want, client.FieldOwner(Name), client.ForceOwnership)
	}
	return nil
}
