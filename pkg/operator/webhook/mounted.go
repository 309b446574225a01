package webhook

import (
	"crypto/tls"
	"path/filepath"

	"sigs.k8s.io/controller-runtime/pkg/certwatcher"
)

// Mounted is a certificate in files. Another program, such as the Operator Lifecycle Manager, writes and renews them, and has the API server
// know it. It configures the webhooks too, with paths that are the same in all clusters: there is no ticket.
type Mounted struct{ *certwatcher.CertWatcher }

// NewMounted reads the certificate of a directory, and reads it again while it runs.
func NewMounted(directory string) (Mounted, error) {
	watcher, err := certwatcher.New(filepath.Join(directory, servedCertificate), filepath.Join(directory, servedKey))
	return Mounted{watcher}, err
}

// Configure has a server show the certificate of the moment.
func (m Mounted) Configure(config *tls.Config) { config.GetCertificate = m.GetCertificate }

func (Mounted) accepts(ticket string) bool { return ticket == "" }
