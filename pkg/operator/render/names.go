package render

import (
	"maps"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// What things are called in the clusters of today's users, who have them from the upstream operator.
const (
	DriverDaemonSet = "hostpath-provisioner-csi"
	driverAccount   = "hostpath-provisioner-admin-csi"
	// DriverRole is what the driver may do in the cluster.
	DriverRole        = driverAccount
	driverConstraints = "hostpath-provisioner-csi"
	// The pre-CSI provisioner, which pathConfig deploys.
	LegacyDaemonSet   = "hostpath-provisioner"
	legacyAccount     = "hostpath-provisioner-admin"
	legacyRole        = "hostpath-provisioner"
	legacyConstraints = "hostpath-provisioner"

	MetricsService = "hpp-prometheus-metrics"
	// Those of the pre-CSI provisioner and of the operator itself, as their manifests have them.
	legacyMetricsService   = "hostpath-provisioner-metrics"
	operatorMetricsService = "hostpath-provisioner-operator-metrics"
	prometheusRule         = "prometheus-hpp-rules"
	serviceMonitor         = "service-monitor-hpp"
	operatorMonitor        = "service-monitor-hpp-operator"
	monitoringRole         = "hostpath-provisioner-monitoring"
	// What the upstream operator had for a health check of the driver.
	upstreamHealthCheck = "hostpath-provisioner-health-check"

	// DriverName is the provisioner of StorageClasses.
	DriverName = "kubevirt.io.hostpath-provisioner"
	// LegacyName is the same of the pre-CSI provisioner.
	LegacyName = "kubevirt.io/hostpath-provisioner"
	// PoolParameter is the parameter of StorageClasses, and the attribute of PersistentVolumes, that names a pool.
	PoolParameter = "storagePool"

	AppLabel       = "k8s-app"
	App            = "hostpath-provisioner"
	managedByLabel = "app.kubernetes.io/managed-by"
	managedBy      = "hostpath-provisioner-operator"
	nameLabel      = "app.kubernetes.io/name"
	metricsLabel   = "prometheus.hostpathprovisioner.kubevirt.io"
	// poolLabel has the name of a pool with "-hpp" behind it.
	PoolLabel = "kubevirt.io.hostpath-provisioner/storagePool"
	// UpstreamPoolLabel is the only one that all pods of mounters have, also those of the upstream operator.
	UpstreamPoolLabel = "hpp-pool"

	// sharedAnnotation of the CSIDriver has the names of the pools that are shared, with commas.
	sharedAnnotation = "hostpathprovisioner.kubevirt.io/shared-pools"

	mounterImage = "ghcr.io/kubevirt/hostpath-provisioner/pool-mounter"

	// clusterServicesLabel lets pods at the API server where KubeVirt's network policies keep others from it.
	clusterServicesLabel = "np.kubevirt.io/allow-access-cluster-services"

	requiredConstraints = "openshift.io/required-scc"

	kubeletDirectory = "/var/lib/kubelet"
)

// Names are those of what the operator deploys, by kind, and of what the upstream operator did, up to the roles of its versions 0.10 and
// 0.11, which later ones left behind. The rights of the operator are limited to them (deploy/operator/rbac.yaml). Mounters and
// clean-ups have the names of pools and nodes.
var Names = map[string][]string{
	"DaemonSet":                  {DriverDaemonSet, LegacyDaemonSet},
	"Service":                    {MetricsService, legacyMetricsService, operatorMetricsService},
	"ServiceAccount":             {driverAccount, legacyAccount},
	"Role":                       {driverAccount, legacyRole, monitoringRole, upstreamHealthCheck},
	"RoleBinding":                {driverAccount, legacyRole, monitoringRole, upstreamHealthCheck},
	"ClusterRole":                {driverAccount, legacyRole, upstreamHealthCheck},
	"ClusterRoleBinding":         {driverAccount, legacyRole, upstreamHealthCheck},
	"CSIDriver":                  {DriverName},
	"PrometheusRule":             {prometheusRule},
	"ServiceMonitor":             {serviceMonitor, operatorMonitor},
	"SecurityContextConstraints": {driverConstraints, legacyConstraints},
}

// MayChange says whether the operator has the right to change and remove an object of this kind and name.
func MayChange(kind, name string) bool {
	known, limited := Names[kind]
	return !limited || slices.Contains(known, name)
}

// Owned selects what belongs to the operator. The upstream operator has the same labels on its objects.
var Owned = map[string]string{AppLabel: App, managedByLabel: managedBy}

// labels are on everything that is deployed, and on its pods.
func (c Config) labels() map[string]string {
	labels := map[string]string{
		AppLabel:                      App,
		managedByLabel:                managedBy,
		"app.kubernetes.io/component": "storage",
	}
	if c.PartOf != "" {
		labels["app.kubernetes.io/part-of"] = c.PartOf
	}
	if c.VersionLabel != "" {
		labels["app.kubernetes.io/version"] = c.VersionLabel
	}
	return labels
}

// meta is that of an object in the operator's namespace, with labels of its own.
func (c Config) meta(name string, labels map[string]string) metav1.ObjectMeta {
	meta := c.clusterMeta(name, labels)
	meta.Namespace = c.Namespace
	return meta
}

// clusterMeta has no owner: a deletion in the foreground would take what has one from under the pods, before the operator is asked.
func (c Config) clusterMeta(name string, labels map[string]string) metav1.ObjectMeta {
	all := c.labels()
	maps.Copy(all, labels)
	return metav1.ObjectMeta{Name: name, Labels: all}
}
