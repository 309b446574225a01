package webhook

import (
	"bytes"
	"context"
	"crypto/subtle"
	"crypto/tls"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	admissionapply "k8s.io/client-go/applyconfigurations/admissionregistration/v1"
	"k8s.io/utils/ptr"
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

// Certificates has the certificate that the webhook serves, and the ticket that goes with its key. It makes and renews them, and has the
// API server know them. It works in every replica: what one of them writes, the others take.
type Certificates struct {
	reader    client.Reader
	writer    client.Client
	namespace string
	rotation  rotation
	now       func() time.Time
	served    atomic.Pointer[tls.Certificate]
	tickets   atomic.Pointer[[]string]
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

// refresh brings Secret, served certificate and webhook configurations to what they should be. Without any configuration there
// is no webhook, and nothing to do.
func (c *Certificates) refresh(ctx context.Context) error {
	validating, restores := &admissionv1.ValidatingWebhookConfiguration{}, &admissionv1.MutatingWebhookConfiguration{}
	validatingErr := c.reader.Get(ctx, client.ObjectKey{Name: Name}, validating)
	restoresErr := c.reader.Get(ctx, client.ObjectKey{Name: restoresName}, restores)
	if apierrors.IsNotFound(validatingErr) && apierrors.IsNotFound(restoresErr) {
		return nil // neither deploy/operator/webhook nor deploy/operator/restores is applied
	}
	if err := errors.Join(client.IgnoreNotFound(validatingErr), client.IgnoreNotFound(restoresErr)); err != nil {
		return err
	}
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: c.namespace, Name: Name}}
	err := c.reader.Get(ctx, client.ObjectKeyFromObject(secret), secret)
	if client.IgnoreNotFound(err) != nil {
		return err
	}
	_, elsewhere := validating.Annotations[injectAnnotation]
	_, elsewhereToo := restores.Annotations[injectAnnotation]
	if elsewhere = elsewhere || elsewhereToo; !elsewhere {
		if err := c.rotate(ctx, secret, apierrors.IsNotFound(err), ownersOf(validating, restores)); err != nil {
			return err
		}
	}
	pair, err := tls.X509KeyPair(secret.Data[servedCertificate], secret.Data[servedKey])
	if err != nil {
		return fmt.Errorf("read the Secret %s/%s: %w", c.namespace, Name, err)
	}
	news := announcement{ticket: c.take(secret.Data)}
	if !elsewhere {
		news.bundle = bundle(secret.Data)
	}
	// The API server knows a certificate before it is served.
	if err := errors.Join(c.announce(ctx, validating, news), c.announceRestores(ctx, restores, news)); err != nil {
		return err
	}
	c.served.Store(&pair)
	return nil
}

// mostTickets are those of the certificate that is served, of the next one, and of two before: the API server may know one of them yet.
const mostTickets = 4

// take accepts the tickets of a Secret from now on. It returns the one to announce, which this replica has accepted for the time of a
// refresh, as the others have then, or none.
func (c *Certificates) take(data map[string][]byte) string {
	var known []string
	if tickets := c.tickets.Load(); tickets != nil {
		known = *tickets
	}
	served := ticketOf(data[servedKey])
	tickets := []string{served}
	if len(data[nextKey]) > 0 {
		tickets = append(tickets, ticketOf(data[nextKey]))
	}
	for _, before := range known {
		if !slices.Contains(tickets, before) && len(tickets) < mostTickets {
			tickets = append(tickets, before)
		}
	}
	c.tickets.Store(&tickets)
	if known != nil && !slices.Contains(known, served) {
		return ""
	}
	return served
}

// accepts says whether a ticket is one of those that the API server may have.
func (c *Certificates) accepts(ticket string) bool {
	tickets := c.tickets.Load()
	return tickets != nil && slices.ContainsFunc(*tickets, func(known string) bool {
		return subtle.ConstantTimeCompare([]byte(known), []byte(ticket)) == 1
	})
}

// rotate writes what the Secret should have. Of several replicas that do so at the same time one succeeds, and the others
// read what it has written the next time.
func (c *Certificates) rotate(ctx context.Context, secret *corev1.Secret, missing bool, owners []metav1.OwnerReference) error {
	data, changed, err := c.rotation.step(secret.Data, c.now())
	if err != nil || !changed {
		return err
	}
	secret.Data, secret.Type = data, corev1.SecretTypeTLS
	if missing {
		secret.OwnerReferences = owners
		return c.writer.Create(ctx, secret)
	}
	return c.writer.Update(ctx, secret)
}

// ownersOf are those of the webhook configurations that are there. When the last one is removed, as with the operator, Kubernetes removes the
// Secret.
func ownersOf(validating *admissionv1.ValidatingWebhookConfiguration, restores *admissionv1.MutatingWebhookConfiguration) (owners []metav1.OwnerReference) {
	for kind, object := range map[string]client.Object{"ValidatingWebhookConfiguration": validating, "MutatingWebhookConfiguration": restores} {
		if uid := object.GetUID(); uid != "" {
			owners = append(owners, metav1.OwnerReference{APIVersion: admissionv1.SchemeGroupVersion.String(), Kind: kind, Name: object.GetName(), UID: uid})
		}
	}
	return owners
}

// An announcement is what the API server is to know. What is empty is left as it is.
type announcement struct {
	bundle []byte
	ticket string
}

// of is the announcement for one webhook; nil if the API server knows it. A webhook that is configured with a URL is left alone: it goes by
// way of something else than the Service.
func (c *Certificates) of(news announcement, path string, live admissionv1.WebhookClientConfig) *admissionapply.WebhookClientConfigApplyConfiguration {
	if live.Service == nil {
		return nil
	}
	path = "/" + path + "/" + news.ticket
	if news.ticket == "" {
		path = ptr.Deref(live.Service.Path, "/")
	}
	if ptr.Deref(live.Service.Path, "/") == path && (news.bundle == nil || bytes.Equal(live.CABundle, news.bundle)) {
		return nil
	}
	want := admissionapply.WebhookClientConfig().WithService(
		admissionapply.ServiceReference().WithNamespace(live.Service.Namespace).WithName(live.Service.Name).WithPath(path))
	if news.bundle != nil {
		want.WithCABundle(news.bundle...)
	}
	return want
}

// announce writes the certificates that the API server accepts and the path that it calls, and no other field of the configuration.
func (c *Certificates) announce(ctx context.Context, live *admissionv1.ValidatingWebhookConfiguration, news announcement) error {
	for _, hook := range live.Webhooks {
		config := c.of(news, ValidatePath, hook.ClientConfig)
		if hook.Name != webhookName || config == nil {
			continue
		}
		want := admissionapply.ValidatingWebhookConfiguration(Name).WithWebhooks(
			admissionapply.ValidatingWebhook().WithName(webhookName).WithClientConfig(config))
		return c.writer.Apply(ctx, want, client.FieldOwner(Name), client.ForceOwnership)
	}
	return nil
}

// announceRestores does the same for the webhook of claims.
func (c *Certificates) announceRestores(ctx context.Context, live *admissionv1.MutatingWebhookConfiguration, news announcement) error {
	for _, hook := range live.Webhooks {
		config := c.of(news, RestoresPath, hook.ClientConfig)
		if hook.Name != restoresWebhook || config == nil {
			continue
		}
		want := admissionapply.MutatingWebhookConfiguration(restoresName).WithWebhooks(
			admissionapply.MutatingWebhook().WithName(restoresWebhook).WithClientConfig(config))
		return c.writer.Apply(ctx, want, client.FieldOwner(Name), client.ForceOwnership)
	}
	return nil
}
