package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
)

// interval is between two scrapes: shorter than on a cluster, for a picture that is
// taken after minutes.
const interval = "5s"

// A prometheus watches the drivers of a scene.
type prometheus struct {
	address string
	command *exec.Cmd
	log     bytes.Buffer
}

func watch(ctx context.Context, o order, s *scene) (*prometheus, error) {
	program, err := o.program()
	if err != nil {
		return nil, err
	}
	rules, err := os.ReadFile(filepath.Join(o.monitoring, "prometheusrule.yaml"))
	if err != nil {
		return nil, err
	}
	dir := filepath.Join(s.dir, "prometheus")
	config := filepath.Join(dir, "prometheus.yaml")
	if err := errors.Join(
		os.Mkdir(dir, 0o750),
		os.WriteFile(filepath.Join(dir, "rules.yaml"), []byte(ruleGroups(string(rules))), 0o600),
		os.WriteFile(config, []byte(configuration(s.workers)), 0o600),
	); err != nil {
		return nil, err
	}
	p := &prometheus{}
	if p.address, err = freeAddress(ctx); err != nil {
		return nil, err
	}
	p.command = exec.Command(program, "--config.file="+config, "--storage.tsdb.path="+filepath.Join(dir, "data"),
		"--web.listen-address="+p.address, "--log.level=warn")
	p.command.Stderr = &p.log
	p.command.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := p.command.Start(); err != nil {
		return nil, fmt.Errorf("start Prometheus: %w", err)
	}
	return p, nil
}

// ruleGroups are the rules of a PrometheusRule as Prometheus reads them: its spec, by
// itself.
func ruleGroups(object string) string {
	_, spec, _ := strings.Cut(object, "\nspec:\n")
	return strings.ReplaceAll("\n"+spec, "\n  ", "\n")
}

// configuration has the targets with the labels that the ServiceMonitor gives them.
func configuration(workers []*worker) string {
	var b strings.Builder
	fmt.Fprintf(&b, `global: {scrape_interval: %[1]s, scrape_timeout: %[1]s, evaluation_interval: %[1]s}
rule_files: [rules.yaml]
scrape_configs:
- job_name: hostpath-csi-driver
  scheme: https
  tls_config: {insecure_skip_verify: true}
  static_configs:
`, interval)
	for _, w := range workers {
		fmt.Fprintf(&b, "  - targets: [%q]\n    labels: {namespace: hostpath-provisioner, node: %[2]s, instance: %[2]s}\n", w.address, w.name)
	}
	return b.String()
}

func (p *prometheus) stop() error {
	if err := p.command.Process.Signal(syscall.SIGTERM); err != nil {
		return fmt.Errorf("stop Prometheus: %w\n%s", err, &p.log)
	}
	if err := p.command.Wait(); err != nil {
		return fmt.Errorf("stop Prometheus: %w\n%s", err, &p.log)
	}
	return nil
}
