// Package control runs the control plane of a cluster: etcd, the API server, the
// controllers and the scheduler, all of them the real programs. It has the
// network of its sandbox for itself, so every address and port is fixed.
package control

import (
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"kubevirt.io/hostpath-provisioner/test/cluster/audit"
	"kubevirt.io/hostpath-provisioner/test/cluster/process"
)

const (
	// Address is where the control plane and the nodes are.
	Address = "192.0.2.1"
	// Service is the address by which pods know the API server. The API server
	// answers there itself, so that no proxy is needed.
	Service      = "10.96.0.1"
	serviceRange = "10.96.0.0/16"
	// Port is that of the API server, on both addresses and on localhost.
	Port = "443"

	etcdURL = "http://127.0.0.1:2379"
)

// A user is who may come with a token of its own.
type user struct{ name, group, token string }

// A Plane is a running control plane.
type Plane struct {
	// Dir has its files; Programs and Logs are where programs are and logs go.
	dir, programs, logs string
	// gates are the feature gates of the API server, as "Name=true".
	gates string

	users     map[string]user
	processes []*process.Process
}

// Admin may do everything.
const Admin = "admin"

// Node is the user name of a node's kubelet.
func Node(name string) string { return "system:node:" + name }

// New prepares a control plane for nodes of these names. Its files are in a
// directory, its programs in another one. The feature gates are those of the API
// server, as "Name=true".
func New(dir, programs, logs string, nodes []string, gates string) (*Plane, error) {
	p := &Plane{dir: dir, programs: programs, logs: logs, gates: gates, users: map[string]user{}}
	known := []user{
		{name: Admin, group: "system:masters"},
		{name: "system:kube-controller-manager"},
		{name: "system:kube-scheduler"},
	}
	for _, node := range nodes {
		known = append(known, user{name: Node(node), group: "system:nodes"})
	}
	var tokens strings.Builder
	for i, u := range known {
		u.token = rand.Text()
		p.users[u.name] = u
		fmt.Fprintf(&tokens, "%s,%s,%d,%q\n", u.token, u.name, i, u.group)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	return p, errors.Join(
		os.WriteFile(p.file("tokens.csv"), []byte(tokens.String()), 0o600),
		writeKey(p.file("service-accounts.key")),
	)
}

func (p *Plane) file(name string) string { return filepath.Join(p.dir, name) }

func writeKey(path string) error {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return err
	}
	block := &pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)}
	return os.WriteFile(path, pem.EncodeToMemory(block), 0o600)
}

// Start starts the control plane and returns when it answers.
func (p *Plane) Start(ctx context.Context) error {
	for _, address := range []string{Address, Service} {
		if out, err := exec.CommandContext(ctx, "ip", "address", "add", address+"/32", "dev", "lo").CombinedOutput(); err != nil {
			return fmt.Errorf("ip address add %s: %w: %s", address, err, out)
		}
	}
	if err := p.startEtcd(ctx); err != nil {
		return err
	}
	if err := p.startServer(ctx); err != nil {
		return err
	}
	return p.startControllers(ctx)
}

func (p *Plane) run(name string, args ...string) (*process.Process, error) {
	running, err := process.Start(name, p.logs, exec.Command(filepath.Join(p.programs, name), args...))
	if err == nil {
		p.processes = append(p.processes, running)
	}
	return running, err
}

func (p *Plane) startEtcd(ctx context.Context) error {
	etcd, err := process.Start("etcd", p.logs, exec.Command(filepath.Join(p.programs, "server"),
		"--data-dir="+p.file("etcd"),
		"--listen-client-urls="+etcdURL, "--advertise-client-urls="+etcdURL,
		"--listen-peer-urls=http://127.0.0.1:2380",
		// Nothing has to survive here.
		"--unsafe-no-fsync",
		"--log-level=warn",
	))
	if err != nil {
		return err
	}
	p.processes = append(p.processes, etcd)
	return etcd.UntilReady(ctx, func(ctx context.Context) error { return healthy(ctx, http.DefaultClient, etcdURL+"/health") })
}

func (p *Plane) startServer(ctx context.Context) error {
	if err := os.WriteFile(p.file("audit-policy.yaml"), []byte(audit.Policy), 0o600); err != nil {
		return err
	}
	server, err := p.run("kube-apiserver",
		"--etcd-servers="+etcdURL,
		"--bind-address=0.0.0.0", "--secure-port="+Port, "--advertise-address="+Address,
		"--cert-dir="+p.file("certificates"),
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file="+p.file("service-accounts.key"),
		"--service-account-signing-key-file="+p.file("service-accounts.key"),
		"--service-cluster-ip-range="+serviceRange,
		"--token-auth-file="+p.file("tokens.csv"),
		"--authorization-mode=Node,RBAC",
		"--enable-admission-plugins=NodeRestriction",
		// Webhooks are called at the addresses of their pods: there is no proxy that knows the addresses of Services.
		"--enable-aggregator-routing=true",
		"--allow-privileged=true",
		"--audit-policy-file="+p.file("audit-policy.yaml"), "--audit-log-path="+audit.Path(p.logs),
		// Else it looks nodes up by their names to fetch logs.
		"--kubelet-preferred-address-types=InternalIP",
		"--feature-gates="+p.gates,
		"--v=1",
	)
	if err != nil {
		return err
	}
	return server.UntilReady(ctx, func(ctx context.Context) error {
		config, err := p.Config(Admin)
		if err != nil {
			return err
		}
		client, err := rest.HTTPClientFor(config)
		if err != nil {
			return err
		}
		return healthy(ctx, client, config.Host+"/readyz")
	})
}

func (p *Plane) startControllers(ctx context.Context) error {
	manager, err := p.program("kube-controller-manager",
		"--service-account-private-key-file="+p.file("service-accounts.key"),
		"--use-service-account-credentials=true",
		"--root-ca-file="+p.certificate(),
		"--leader-elect=false",
		// Two machines' worth of pods come and go fast here.
		"--kube-api-qps=200", "--kube-api-burst=400",
		"--v=2",
	)
	if err != nil {
		return err
	}
	scheduler, err := p.program("kube-scheduler", "--leader-elect=false", "--kube-api-qps=200", "--kube-api-burst=400", "--v=2")
	if err != nil {
		return err
	}
	if err := manager.UntilReady(ctx, p.serviceAccounts); err != nil {
		return err
	}
	return scheduler.Err()
}

// program starts one that talks to the API server under its own name.
func (p *Plane) program(name string, args ...string) (*process.Process, error) {
	kubeconfig := p.file(name + ".kubeconfig")
	if err := p.WriteKubeconfig(kubeconfig, "system:"+name, Server); err != nil {
		return nil, err
	}
	return p.run(name, append(args, "--kubeconfig="+kubeconfig)...)
}

// serviceAccounts reports whether pods can be made yet in the namespace default.
func (p *Plane) serviceAccounts(ctx context.Context) error {
	config, err := p.Config(Admin)
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	return client.CoreV1().RESTClient().Get().AbsPath("/api/v1/namespaces/default/serviceaccounts/default").Do(ctx).Error()
}

func healthy(ctx context.Context, client *http.Client, url string) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	response, err := client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s answers %s", url, response.Status)
	}
	return nil
}

// Server is where the API server is inside the sandbox. Its certificate is for
// this name.
const Server = "https://localhost:" + Port

func (p *Plane) certificate() string { return p.file("certificates/apiserver.crt") }

// WriteKubeconfig writes a file by which a user finds the API server.
func (p *Plane) WriteKubeconfig(path, name, server string) error {
	u, ok := p.users[name]
	if !ok {
		return fmt.Errorf("no user %s", name)
	}
	certificate, err := os.ReadFile(p.certificate())
	if err != nil {
		return err
	}
	return clientcmd.WriteToFile(clientcmdapi.Config{
		Clusters:       map[string]*clientcmdapi.Cluster{"test": {Server: server, CertificateAuthorityData: certificate}},
		AuthInfos:      map[string]*clientcmdapi.AuthInfo{name: {Token: u.token}},
		Contexts:       map[string]*clientcmdapi.Context{"test": {Cluster: "test", AuthInfo: name}},
		CurrentContext: "test",
	}, path)
}

// Config is how a user reaches the API server.
func (p *Plane) Config(name string) (*rest.Config, error) {
	certificate, err := os.ReadFile(p.certificate())
	if err != nil {
		return nil, err
	}
	return &rest.Config{
		Host:            Server,
		BearerToken:     p.users[name].token,
		TLSClientConfig: rest.TLSClientConfig{CAData: certificate},
		QPS:             200,
		Burst:           400,
	}, nil
}

// Err says which of its programs have ended, if any have.
func (p *Plane) Err() error {
	var problems []error
	for _, running := range p.processes {
		problems = append(problems, running.Err())
	}
	return errors.Join(problems...)
}
