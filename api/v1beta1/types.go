package v1beta1

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const (
	// Kind is the kind of the object that the operator acts on.
	Kind = "HostPathProvisioner"
	// Finalizer is on each object that has something deployed. The name is the upstream operator's.
	Finalizer = "finalizer.delete.hostpath-provisioner"
	// LegacyPool is the name of the pool that pathConfig makes.
	LegacyPool = "legacy"
	// DefaultOverlayClass is the StorageClass of a shared pool that names none.
	DefaultOverlayClass = "hpp-overlay"
)

// Feature gates.
const (
	// Snapshotting has the driver's pods make snapshots.
	Snapshotting = "Snapshotting"
	// Freezing lets the driver stop the pods that use a volume while a snapshot of it is made, where a class asks for that.
	Freezing = "Freezing"
)

// Types of conditions.
const (
	// ConditionAvailable is true when the driver's pods are ready and every pool is served. While something is rolled out, the pods that
	// are being replaced may be missing.
	ConditionAvailable = "Available"
	// ConditionProgressing is true while something is being rolled out or removed.
	ConditionProgressing = "Progressing"
	// ConditionDegraded is true when something is wrong that does not go away by waiting.
	ConditionDegraded = "Degraded"
	// ConditionRolledOut is true when what the object asks for is on all nodes, in the version of the operator. The upstream operator does
	// not have it.
	ConditionRolledOut = "RolledOut"
)

// HostPathProvisioner says which storage pools the nodes of a cluster have. The operator deploys the CSI driver for
// them. A cluster has one of these objects.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:scope=Cluster,shortName=hpp,categories=storage
// +kubebuilder:subresource:status
// +kubebuilder:printcolumn:name="Available",type=string,JSONPath=`.status.conditions[?(@.type=="Available")].status`
// +kubebuilder:printcolumn:name="Progressing",type=string,JSONPath=`.status.conditions[?(@.type=="Progressing")].status`
// +kubebuilder:printcolumn:name="Degraded",type=string,JSONPath=`.status.conditions[?(@.type=="Degraded")].status`
// +kubebuilder:printcolumn:name="Version",type=string,JSONPath=`.status.observedVersion`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name="Message",type=string,priority=1,JSONPath=`.status.conditions[?(@.type=="Available")].message`
type HostPathProvisioner struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// +required
	Spec HostPathProvisionerSpec `json:"spec"`
	// +optional
	Status HostPathProvisionerStatus `json:"status,omitempty"`
}

// HostPathProvisionerList is what a list of them is answered with.
//
// +kubebuilder:object:root=true
type HostPathProvisionerList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []HostPathProvisioner `json:"items"`
}

// HostPathProvisionerSpec defines the desired state of HostPathProvisioner
//
// +kubebuilder:validation:XValidation:rule="has(self.pathConfig) != (has(self.storagePools) && size(self.storagePools) > 0)",message="set either storagePools or the deprecated pathConfig, and not both"
// +kubebuilder:validation:XValidation:rule="!has(self.kubeletDirectory) || self.kubeletDirectory == '/var/lib/kubelet' || !((has(self.storagePools) && self.storagePools.exists(p, (p.path + '/').startsWith(self.kubeletDirectory + '/'))) || (has(self.pathConfig) && (self.pathConfig.path + '/').startsWith(self.kubeletDirectory + '/')))",message="the path of a pool must not lie in kubeletDirectory"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.pathConfig) || has(self.pathConfig) || !has(self.storagePools) || self.storagePools.all(p, p.name != 'legacy' || (p.path == oldSelf.pathConfig.path && !has(p.pvcTemplate)))",message="the pool legacy in place of pathConfig must have its path, and no pvcTemplate: volumes would be left behind"
// +kubebuilder:validation:XValidation:rule="!has(self.pathConfig) || has(oldSelf.pathConfig) || !has(oldSelf.storagePools) || oldSelf.storagePools.all(p, p.name != 'legacy' || (p.path == self.pathConfig.path && !has(p.pvcTemplate)))",message="pathConfig in place of the pool legacy must have its path, and that pool no pvcTemplate: volumes would be left behind"
type HostPathProvisionerSpec struct {
	// ImagePullPolicy is that of every container which the operator deploys. Kubernetes chooses if it is not set.
	// +optional
	// +kubebuilder:validation:Enum="";Always;IfNotPresent;Never
	ImagePullPolicy corev1.PullPolicy `json:"imagePullPolicy,omitempty"`

	// ImagePullSecrets are Secrets in the operator's namespace that images are pulled with.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=16
	ImagePullSecrets []corev1.LocalObjectReference `json:"imagePullSecrets,omitempty"`

	// PathConfig is deprecated: use storagePools. It deploys the provisioner from before CSI next to the driver. The
	// directory is the driver's pool "legacy" as well.
	// +optional
	PathConfig *PathConfig `json:"pathConfig,omitempty"`

	// Workload says on which nodes the driver runs. Volumes can only be used there.
	// +optional
	Workload NodePlacement `json:"workload,omitempty"`

	// FeatureGates add what not every cluster can have. Snapshotting deploys csi-snapshotter, which needs the
	// CustomResourceDefinitions and the snapshot-controller of external-snapshotter. Freezing deploys the container that
	// "consistency: freeze" of a VolumeSnapshotClass needs, which can stop every pod of its node.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:items:Enum=Snapshotting;Freezing
	FeatureGates []string `json:"featureGates,omitempty"`

	// StoragePools are the places on each node that volumes are made in.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=32
	// +kubebuilder:validation:XValidation:rule="self.all(a, self.all(b, a.name == b.name || (a.path != b.path && !a.path.startsWith(b.path + '/'))))",message="the paths of storagePools must be different, and none may lie inside another"
	StoragePools []StoragePool `json:"storagePools,omitempty"`

	// KubeletDirectory is the root directory of kubelet on all nodes (its --root-dir).
	// +optional
	// +kubebuilder:default=/var/lib/kubelet
	// +kubebuilder:validation:MaxLength=255
	// +kubebuilder:validation:Pattern=`^(/[^/\s]+)+$`
	// +kubebuilder:validation:XValidation:rule="!self.split('/').exists(e, e == '.' || e == '..')",message="must be a clean absolute path"
	KubeletDirectory string `json:"kubeletDirectory,omitempty"`

	// PriorityClassName is that of the driver's pods, system-node-critical if not set.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	PriorityClassName string `json:"priorityClassName,omitempty"`

	// LogLevel is the --v of the driver and its sidecars. If it is not set, VERBOSITY of the operator counts, and then 2.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=10
	LogLevel *int32 `json:"logLevel,omitempty"`

	// Resources of the containers that the operator deploys.
	// +optional
	Resources ComponentResources `json:"resources,omitempty"`
}

// ComponentResources are requests and limits by the kind of container. What is not set is as the operator has it.
type ComponentResources struct {
	// Driver is the container that makes and mounts volumes, and that of the provisioner which pathConfig deploys.
	// +optional
	Driver *corev1.ResourceRequirements `json:"driver,omitempty"`
	// Sidecars are each of the other containers next to the driver.
	// +optional
	Sidecars *corev1.ResourceRequirements `json:"sidecars,omitempty"`
	// Mounter is what mounts pools that have a pvcTemplate.
	// +optional
	Mounter *corev1.ResourceRequirements `json:"mounter,omitempty"`
}

// HostDirectory is a clean absolute path of a directory on a node, outside of what belongs to the system.
//
// +kubebuilder:validation:MinLength=1
// +kubebuilder:validation:MaxLength=255
// +kubebuilder:validation:XValidation:rule="self.startsWith('/') && !self.endsWith('/') && !self.contains('//') && !self.split('/').exists(e, e == '.' || e == '..')",message="must be a clean absolute path, such as /var/hpvolumes"
// +kubebuilder:validation:XValidation:rule="!(self in ['/bin', '/boot', '/dev', '/etc', '/home', '/lib', '/lib64', '/media', '/mnt', '/opt', '/proc', '/root', '/run', '/sbin', '/srv', '/sys', '/tmp', '/usr', '/var', '/var/cache', '/var/lib', '/var/lib/containerd', '/var/lib/containers', '/var/lib/etcd', '/var/log', '/var/run', '/var/tmp'])",message="must not be a directory of the system"
// +kubebuilder:validation:XValidation:rule="!['/bin/', '/boot/', '/dev/', '/etc/', '/lib/', '/lib64/', '/proc/', '/run/', '/sbin/', '/sys/', '/usr/', '/var/run/', '/var/lib/kubelet/', '/var/lib/containerd/', '/var/lib/containers/', '/var/lib/etcd/'].exists(d, (self + '/').startsWith(d))",message="must not lie in a directory of the system"
// +kubebuilder:validation:XValidation:rule="!['/csi', '/host/dev', '/var/lib/hostpath-provisioner-state'].exists(d, (self + '/').startsWith(d + '/') || (d + '/').startsWith(self + '/'))",message="must not be where the driver's containers have mounts: at, in or above /csi, /host/dev and /var/lib/hostpath-provisioner-state"
type HostDirectory string

// PathConfig is the deprecated way to name one directory.
type PathConfig struct {
	// Path is a directory on each node.
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="must not change: volumes would be left behind"
	// +kubebuilder:validation:XValidation:rule="!(self + '/').startsWith('/system/')",message="must not be where the provisioner's container has mounts: at or in /system"
	Path HostDirectory `json:"path"`
	// UseNamingPrefix begins the names of directories with the name of their claim.
	// +optional
	UseNamingPrefix bool `json:"useNamingPrefix,omitempty"`
}

// NodePlacement selects nodes as a pod does.
type NodePlacement struct {
	// +optional
	NodeSelector map[string]string `json:"nodeSelector,omitempty"`
	// +optional
	Affinity *corev1.Affinity `json:"affinity,omitempty"`
	// Tolerations of the driver's pods. If there are none, nodes with taints do not get the driver.
	// +optional
	Tolerations []corev1.Toleration `json:"tolerations,omitempty"`
}

// StoragePool is a place on each node that volumes are made in.
//
// +kubebuilder:validation:XValidation:rule="self.path == oldSelf.path",message="path must not change: volumes would be left behind. Add a pool with another name instead"
// +kubebuilder:validation:XValidation:rule="has(self.pvcTemplate) == has(oldSelf.pvcTemplate)",message="pvcTemplate must not be added or removed: volumes would be left behind. Add a pool with another name instead"
type StoragePool struct {
	// Name is what the parameter storagePool of a StorageClass says.
	// +kubebuilder:validation:MaxLength=50
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	Name string `json:"name"`

	// Path is a directory on each node. Volumes are in its directory csi.
	Path HostDirectory `json:"path"`

	// PVCTemplate is for pools whose disk comes from another StorageClass: each node gets a claim of its own, or all
	// nodes share one if it is ReadWriteMany.
	// +optional
	// +kubebuilder:validation:XValidation:rule="(has(self.accessModes) && 'ReadWriteMany' in self.accessModes) == (has(oldSelf.accessModes) && 'ReadWriteMany' in oldSelf.accessModes)",message="accessModes must not change between shared and not shared"
	// +kubebuilder:validation:XValidation:rule="(has(self.volumeMode) ? self.volumeMode : 'Filesystem') == (has(oldSelf.volumeMode) ? oldSelf.volumeMode : 'Filesystem')",message="volumeMode must not change"
	// +kubebuilder:validation:XValidation:rule="!(has(self.volumeMode) && self.volumeMode == 'Block' && has(self.accessModes) && 'ReadWriteMany' in self.accessModes)",message="volumeMode Block must not be ReadWriteMany: each node would format the device"
	PVCTemplate *ClaimTemplate `json:"pvcTemplate,omitempty"`

	// SnapshotProvider is passed to the driver. Only reflink is known.
	// +optional
	// +kubebuilder:validation:Enum=reflink
	SnapshotProvider *string `json:"snapshotProvider,omitempty"`

	// OverlayClassName is the StorageClass that the operator makes for a pool whose claim is shared, hpp-overlay if not
	// set.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$`
	OverlayClassName string `json:"overlayClassName,omitempty"`

	// Shared says that path is one filesystem which all nodes have mounted, such as NFS. A pool with a ReadWriteMany
	// template is shared in any case.
	// +optional
	Shared bool `json:"shared,omitempty"`

	// RequireMount has the pool serve only while a filesystem is mounted at <path>/csi. Pools with a template always do.
	// +optional
	RequireMount *bool `json:"requireMount,omitempty"`

	// Enforcement says whether the kernel has to enforce the sizes of volumes: auto, required or none.
	// +optional
	// +kubebuilder:validation:Enum=auto;required;none
	Enforcement string `json:"enforcement,omitempty"`

	// Reserve stays free in the pool: a size such as 5Gi or a share such as 5%.
	// +optional
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:Pattern=`^([0-9]+(\.[0-9]+)?([kMGTPE]i?|Ki)?|[0-9]+(\.[0-9]+)?%)$`
	Reserve string `json:"reserve,omitempty"`

	// Overprovision is the factor by which more than the pool's size may be promised, such as "1.5". It is 1 if not set.
	// +optional
	// +kubebuilder:validation:MaxLength=16
	// +kubebuilder:validation:Pattern=`^[0-9]+(\.[0-9]+)?$`
	Overprovision string `json:"overprovision,omitempty"`

	// Allocation says whether block volumes have their space set aside: thick or thin.
	// +optional
	// +kubebuilder:validation:Enum=thick;thin
	Allocation string `json:"allocation,omitempty"`

	// BytesPerInode gives a volume one inode for so many bytes of its size; 0 is for no limit. If it is not set, new
	// volumes on XFS have one for 16384 bytes, and others no limit.
	// +optional
	// +kubebuilder:validation:Minimum=0
	BytesPerInode *int64 `json:"bytesPerInode,omitempty"`

	// Relabel says what of a volume gets the SELinux label of containers: root, recursive or none.
	// +optional
	// +kubebuilder:validation:Enum=root;recursive;none
	Relabel string `json:"relabel,omitempty"`

	// AllowReadWriteMany has volumes made for ReadWriteMany and ReadOnlyMany in a pool that is not shared: for several pods of one
	// node.
	// +optional
	AllowReadWriteMany bool `json:"allowReadWriteMany,omitempty"`

	// FSType is the filesystem that the block device of a template is formatted with, if it is empty: xfs if not set.
	// +optional
	// +kubebuilder:validation:Enum=xfs;ext4
	FSType string `json:"fsType,omitempty"`

	// MountOptions are those that the device of a template is mounted with.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=32
	// +kubebuilder:validation:items:MaxLength=128
	MountOptions []string `json:"mountOptions,omitempty"`
}

// ClaimTemplate is the spec of the claims of a pool: a corev1.PersistentVolumeClaimSpec, which it converts to, with bounds
// that the rules of the schema need.
type ClaimTemplate struct {
	// AccessModes with ReadWriteMany make one claim for all nodes.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=4
	AccessModes []corev1.PersistentVolumeAccessMode `json:"accessModes,omitempty"`
	// +optional
	Selector *metav1.LabelSelector `json:"selector,omitempty"`
	// Resources has the size of each claim, which may grow.
	// +optional
	Resources corev1.VolumeResourceRequirements `json:"resources,omitempty"`
	// +optional
	VolumeName string `json:"volumeName,omitempty"`
	// StorageClassName has to be a class of another driver, or of another pool. This is not checked.
	// +optional
	StorageClassName *string `json:"storageClassName,omitempty"`
	// VolumeMode is Filesystem, for what the other class has formatted, or Block, for a device that is formatted here.
	// +optional
	// +kubebuilder:validation:Enum=Filesystem;Block
	VolumeMode *corev1.PersistentVolumeMode `json:"volumeMode,omitempty"`
	// +optional
	DataSource *corev1.TypedLocalObjectReference `json:"dataSource,omitempty"`
	// +optional
	DataSourceRef *corev1.TypedObjectReference `json:"dataSourceRef,omitempty"`
	// +optional
	VolumeAttributesClassName *string `json:"volumeAttributesClassName,omitempty"`
}

// HasFeature says whether a feature gate is given.
func (p *HostPathProvisioner) HasFeature(gate string) bool {
	return slices.Contains(p.Spec.FeatureGates, gate)
}

// Spec is that of a claim which is made from the template.
func (t *ClaimTemplate) Spec() *corev1.PersistentVolumeClaimSpec {
	spec := corev1.PersistentVolumeClaimSpec(*t.DeepCopy())
	return &spec
}

// IsShared says whether all nodes have the same filesystem in the pool.
func (p *StoragePool) IsShared() bool {
	if p.PVCTemplate == nil {
		return p.Shared
	}
	for _, mode := range p.PVCTemplate.AccessModes {
		if mode == corev1.ReadWriteMany {
			return true
		}
	}
	return false
}

// SharesDevice says whether all nodes have the same device in the pool, as no filesystem that it can be formatted with allows.
func (p *StoragePool) SharesDevice() bool {
	return p.PVCTemplate != nil && p.IsShared() && p.PVCTemplate.VolumeMode != nil && *p.PVCTemplate.VolumeMode == corev1.PersistentVolumeBlock
}

// A StoragePoolPhase says in a word how a pool is.
type StoragePoolPhase string

// Phases of a pool.
const (
	// StoragePoolPreparing is a pool whose claims are not bound on all nodes.
	StoragePoolPreparing StoragePoolPhase = "Preparing"
	// StoragePoolMounting is a pool that is not usable on all nodes yet.
	StoragePoolMounting StoragePoolPhase = "Mounting"
	// StoragePoolReady is a pool that is usable on all nodes.
	StoragePoolReady StoragePoolPhase = "Ready"
)

// HostPathProvisionerStatus defines the observed state of HostPathProvisioner
type HostPathProvisionerStatus struct {
	// Conditions contains the current conditions observed by the operator
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
	// ObservedGeneration is the generation of the spec that the status is about.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// OperatorVersion The version of the HostPathProvisioner Operator
	// +optional
	OperatorVersion string `json:"operatorVersion,omitempty"`
	// TargetVersion The targeted version of the HostPathProvisioner deployment
	// +optional
	TargetVersion string `json:"targetVersion,omitempty"`
	// ObservedVersion The observed version of the HostPathProvisioner deployment
	// +optional
	ObservedVersion string `json:"observedVersion,omitempty"`
	// StoragePoolStatuses are those of the pools, by name.
	// +optional
	// +listType=atomic
	StoragePoolStatuses []StoragePoolStatus `json:"storagePoolStatuses,omitempty"`
	// MountedPools are the places at which pools with a pvcTemplate are or were mounted. Nothing is unmounted anywhere else.
	// +optional
	// +listType=atomic
	MountedPools []MountedPool `json:"mountedPools,omitempty"`
	// NodeStatuses are up to 100 nodes on which something is wrong.
	// +optional
	// +listType=atomic
	NodeStatuses []NodeStatus `json:"nodeStatuses,omitempty"`
	// DeletedNodes are up to 50 nodes that are gone from the cluster while PersistentVolumes or VolumeSnapshotContents of the driver
	// still name them.
	// +optional
	// +listType=map
	// +listMapKey=node
	DeletedNodes []DeletedNode `json:"deletedNodes,omitempty"`
}

// StoragePoolStatus says how a pool is.
type StoragePoolStatus struct {
	// Name is that of the pool.
	Name string `json:"name"`
	// Phase is Preparing, Mounting or Ready.
	// +optional
	Phase StoragePoolPhase `json:"phase,omitempty"`
	// DesiredReady is the number of nodes that should have the pool.
	// +optional
	DesiredReady int `json:"desiredReady,omitempty"`
	// CurrentReady is the number of nodes that have it.
	// +optional
	CurrentReady int `json:"currentReady,omitempty"`
	// Message says what is wrong, and is empty if nothing is.
	// +optional
	Message string `json:"message,omitempty"`
	// ClaimStatuses are the claims of the pool's template, of hundreds the first, before others those that are not bound.
	// +optional
	// +listType=atomic
	ClaimStatuses []ClaimStatus `json:"claimStatuses,omitempty"`
}

// MountedPool is a place at which a pool may be mounted on some node.
type MountedPool struct {
	// Name is that of the pool.
	Name string `json:"name"`
	// Path is that of the pool.
	Path string `json:"path"`
}

// ClaimStatus is the status of one claim.
type ClaimStatus struct {
	// Name is that of the claim.
	Name string `json:"name"`
	// Status is that of the claim.
	// +optional
	Status corev1.PersistentVolumeClaimStatus `json:"status,omitempty"`
}

// NodeStatus says what is wrong on a node.
type NodeStatus struct {
	// Node is the name of the node.
	Node string `json:"node"`
	// Pool is set if it is about one pool.
	// +optional
	Pool string `json:"pool,omitempty"`
	// Message says what is wrong.
	Message string `json:"message"`
}

// DeletedNode is a node that is gone from the cluster, with what it left behind.
type DeletedNode struct {
	// Node is the name of the node.
	Node string `json:"node"`
	// PersistentVolumes is how many volumes still name it.
	PersistentVolumes int `json:"persistentVolumes"`
	// Claims is how many claims are bound to them.
	// +optional
	Claims int `json:"claims,omitempty"`
	// VolumeSnapshotContents is how many snapshots still name it.
	// +optional
	VolumeSnapshotContents int `json:"volumeSnapshotContents,omitempty"`
}
