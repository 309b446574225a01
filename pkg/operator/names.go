package operator

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
)

// What things are called in the clusters of today's users, who have them from the earlier operator.
const (
	// FieldManager is the one field manager of all that the operator applies.
	FieldManager = "hostpath-provisioner-operator"

	driverDaemonSet   = "hostpath-provisioner-csi"
	driverAccount     = "hostpath-provisioner-admin-csi"
	driverConstraints = "hostpath-provisioner-csi"
	// The pre-CSI provisioner, which pathConfig deploys.
	legacyDaemonSet   = "hostpath-provisioner"
	legacyAccount     = "hostpath-provisioner-admin"
	legacyRole        = "hostpath-provisioner"
	legacyConstraints = "hostpath-provisioner"

	metricsService = "hpp-prometheus-metrics"
	prometheusRule = "prometheus-hpp-rules"
	serviceMonitor = "service-monitor-hpp"
	monitoringRole = "hostpath-provisioner-monitoring"

	// DriverName is the provisioner of StorageClasses.
	DriverName = "kubevirt.io.hostpath-provisioner"

	appLabel       = "k8s-app"
	app            = "hostpath-provisioner"
	managedByLabel = "app.kubernetes.io/managed-by"
	managedBy      = "hostpath-provisioner-operator"
	nameLabel      = "app.kubernetes.io/name"
	metricsLabel   = "prometheus.hostpathprovisioner.kubevirt.io"
	// poolLabel has the name of a pool with "-hpp" behind it.
	poolLabel = "kubevirt.io.hostpath-provisioner/storagePool"

	mounterImage = "quay.io/kubevirt/pool-mounter"

	// clusterServicesLabel lets pods at the API server where KubeVirt's network policies keep others from it.
	clusterServicesLabel = "np.kubevirt.io/allow-access-cluster-services"

	requiredConstraints = "openshift.io/required-scc"

	// appliedAnnotation has a digest of what was applied, by which it is known that something is not wanted any more.
	appliedAnnotation = "hostpathprovisioner.kubevirt.io/applied"
	// earlierAnnotation is on everything that the earlier operator has made.
	earlierAnnotation = "hostpathprovisioner.kubevirt.io/lastAppliedConfiguration"

	kubeletDirectory = "/var/lib/kubelet"
)

// owned selects what belongs to the operator. The earlier operator has the same labels on its objects.
var owned = map[string]string{appLabel: app, managedByLabel: managedBy}

// labels are on everything that is deployed, and on its pods.
func (c Config) labels() map[string]string {
	labels := map[string]string{
		appLabel:                      app,
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

// ownerOf is the reference by which an object belongs to the one that asked for it.
func ownerOf(object *hppv1.HostPathProvisioner) metav1.OwnerReference {
	// Without blockOwnerDeletion, for which the operator would need a right of its own.
	yes := true
	return metav1.OwnerReference{
		APIVersion: hppv1.GroupVersion.String(),
		Kind:       hppv1.Kind,
		Name:       object.Name,
		UID:        object.UID,
		Controller: &yes,
	}
}
