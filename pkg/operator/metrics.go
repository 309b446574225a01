package operator

import (
	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/api/meta"

	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
)

const noObject = -1

// ready is the one metric of the operator's own.
var ready = prometheus.NewGauge(prometheus.GaugeOpts{
	Name: "kubevirt_hpp_cr_ready",
	Help: "Whether what the HostPathProvisioner asks for is available: 1 if so, 0 if not, -1 without a HostPathProvisioner",
})

// RegisterMetrics registers the metrics of the operator.
func RegisterMetrics(registry prometheus.Registerer) error {
	ready.Set(noObject)
	return registry.Register(ready)
}

func measure(status hppv1.HostPathProvisionerStatus) {
	if meta.IsStatusConditionTrue(status.Conditions, hppv1.ConditionAvailable) {
		ready.Set(1)
		return
	}
	ready.Set(0)
}
