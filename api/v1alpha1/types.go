package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

const (
	// Kind is the kind of the object.
	Kind = "VolumeMove"
	// Finalizer is on each VolumeMove that may have something on a node.
	Finalizer = "hostpathprovisioner.kubevirt.io/volume-move"
	// ConditionComplete is true when the volume is on the target, and nothing of it on the source. Otherwise its message says what the
	// move does or waits for.
	ConditionComplete = "Complete"
)

// VolumeMove moves the volume of a claim to another node. Until it is in the phase Switching, deleting it undoes the move. A move that
// has ended may be deleted.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:shortName=vmove,categories=storage
// +kubebuilder:subresource:status
// +kubebuilder:printcolumn:name="Claim",type=string,JSONPath=`.spec.claimName`
// +kubebuilder:printcolumn:name="From",type=string,JSONPath=`.status.sourceNode`
// +kubebuilder:printcolumn:name="To",type=string,JSONPath=`.status.targetNode`
// +kubebuilder:printcolumn:name="Phase",type=string,JSONPath=`.status.phase`
// +kubebuilder:printcolumn:name="Passes",type=integer,JSONPath=`.status.passes`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name="Message",type=string,priority=1,JSONPath=`.status.conditions[?(@.type=="Complete")].message`
type VolumeMove struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// +required
	Spec VolumeMoveSpec `json:"spec"`
	// +optional
	Status VolumeMoveStatus `json:"status,omitempty"`
}

// VolumeMoveList is what a list of them is answered with.
//
// +kubebuilder:object:root=true
type VolumeMoveList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []VolumeMove `json:"items"`
}

// VolumeMoveSpec says which volume moves, and how.
//
// +kubebuilder:validation:XValidation:rule="self.claimName == oldSelf.claimName && self.snapshots == oldSelf.snapshots && self.verify == oldSelf.verify && has(self.targetNode) == has(oldSelf.targetNode) && (!has(self.targetNode) || self.targetNode == oldSelf.targetNode)",message="only bytesPerSecond, when and force can change: delete the VolumeMove and make another"
// +kubebuilder:validation:XValidation:rule="!has(self.force) || !self.force || self.when == 'Evict'",message="force is for when: Evict"
type VolumeMoveSpec struct {
	// ClaimName is the PersistentVolumeClaim, in the namespace of this object.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	ClaimName string `json:"claimName"`

	// TargetNode is where the volume goes. If it is not set, the operator chooses a node that has room and that the pods of the claim may
	// run on.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=200
	TargetNode string `json:"targetNode,omitempty"`

	// Snapshots says what becomes of those of the volume, which do not move: Refuse, the default, does not move a volume that has any, and
	// LeaveBehind leaves them on the source.
	// +optional
	// +kubebuilder:default=Refuse
	// +kubebuilder:validation:Enum=Refuse;LeaveBehind
	Snapshots SnapshotsPolicy `json:"snapshots,omitempty"`

	// When says what stops the pods that use the volume, once most of it is copied: Unpublished, the default, waits for you to do it, and
	// Evict evicts them with respect to their disruption budgets.
	// +optional
	// +kubebuilder:default=Unpublished
	// +kubebuilder:validation:Enum=Unpublished;Evict
	When When `json:"when,omitempty"`

	// Force evicts pods without a controller too. Nothing makes them again.
	// +optional
	Force bool `json:"force,omitempty"`

	// Verify says of which files the content is compared at the end: All, the default, or Changed, which reads less while pods stand
	// still, and misses an asynchronous direct write that took over a second. All else of each entry is always compared.
	// +optional
	// +kubebuilder:default=All
	// +kubebuilder:validation:Enum=Changed;All
	Verify Verify `json:"verify,omitempty"`

	// BytesPerSecond limits what is sent. There is no limit if it is not set.
	// +optional
	// +kubebuilder:validation:Minimum=65536
	BytesPerSecond int64 `json:"bytesPerSecond,omitempty"`
}

// A SnapshotsPolicy says what becomes of snapshots.
type SnapshotsPolicy string

// Policies for snapshots.
const (
	RefuseSnapshots SnapshotsPolicy = "Refuse"
	LeaveSnapshots  SnapshotsPolicy = "LeaveBehind"
)

// When says what stops pods.
type When string

// What stops pods.
const (
	WhenUnpublished When = "Unpublished"
	WhenEvict       When = "Evict"
)

// Verify says what is compared.
type Verify string

// What is compared.
const (
	VerifyChanged Verify = "Changed"
	VerifyAll     Verify = "All"
)

// A Phase says in a word how far a move is.
type Phase string

// Phases of a move, in their order.
const (
	// Pending has begun nothing.
	Pending Phase = "Pending"
	// Copying copies while pods go on.
	Copying Phase = "Copying"
	// Fenced is from when the source may keep pods from starting with the volume.
	Fenced Phase = "Fenced"
	// Switching makes the copy the volume. It can be undone until the PersistentVolume is replaced.
	Switching Phase = "Switching"
	// Removing removes the old copy. Pods run on the target.
	Removing Phase = "Removing"
	// Succeeded has moved the volume.
	Succeeded Phase = "Succeeded"
	// Undoing has the volume be used on the source again, and removes the copy.
	Undoing Phase = "Undoing"
	// Failed has moved nothing.
	Failed Phase = "Failed"
)

// Phases are all of them.
var Phases = []Phase{Pending, Copying, Fenced, Switching, Removing, Succeeded, Undoing, Failed}

// VolumeMoveStatus says how far a move is.
type VolumeMoveStatus struct {
	// ObservedGeneration is the generation of the spec that the status is about.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// Phase is Pending, Copying, Fenced, Switching, Removing, Succeeded, Undoing or Failed.
	// +optional
	Phase Phase `json:"phase,omitempty"`
	// SourceNode is where the volume was.
	// +optional
	SourceNode string `json:"sourceNode,omitempty"`
	// TargetNode is where it goes.
	// +optional
	TargetNode string `json:"targetNode,omitempty"`
	// Volume is the name of the PersistentVolume, which stays.
	// +optional
	Volume string `json:"volume,omitempty"`
	// VolumeUID is that of the PersistentVolume before the move.
	// +optional
	VolumeUID types.UID `json:"volumeUID,omitempty"`
	// VolumeHandle is what the driver calls it.
	// +optional
	VolumeHandle string `json:"volumeHandle,omitempty"`
	// ClaimUID is that of the claim.
	// +optional
	ClaimUID types.UID `json:"claimUID,omitempty"`
	// PromisedBytes is what the volume is promised on the target. A volume without a record, as of the upstream driver, is promised what
	// its claim asks for, or what it holds if that is more. That is known when all of it is copied.
	// +optional
	PromisedBytes int64 `json:"promisedBytes,omitempty"`
	// Fence is what the source drew for the copy that is whole.
	// +optional
	Fence string `json:"fence,omitempty"`
	// Passes is how often the volume was gone over.
	// +optional
	Passes int32 `json:"passes,omitempty"`
	// BytesSent is how much the movers sent so far, since they were last started.
	// +optional
	BytesSent int64 `json:"bytesSent,omitempty"`
	// BytesToGo is about how much a pass still has to send, by the one before. It is not known in the first pass.
	// +optional
	BytesToGo *int64 `json:"bytesToGo,omitempty"`
	// LastDifference is how many bytes the last pass sent.
	// +optional
	LastDifference *int64 `json:"lastDifference,omitempty"`
	// Standstill is the time in which no pod could use the volume.
	// +optional
	Standstill *Standstill `json:"standstill,omitempty"`
	// BegunTime is when the move began: soon after it the target promises the volume its room.
	// +optional
	BegunTime *metav1.Time `json:"begunTime,omitempty"`
	// Copied reports that all is copied but what pods write meanwhile, and that the volumes that pods use together with this one are waited
	// for: all of them are fenced together.
	// +optional
	Copied bool `json:"copied,omitempty"`
	// MayFenceTime is when the source was given leave to fence the volume: from then on it may be fenced.
	// +optional
	MayFenceTime *metav1.Time `json:"mayFenceTime,omitempty"`
	// FencedTime is when the fence was seen to be up: no pod can start with the volume until the phase is Removing, or the move is undone.
	// +optional
	FencedTime *metav1.Time `json:"fencedTime,omitempty"`
	// LastProgressTime is when the move last got further, to about a minute.
	// +optional
	LastProgressTime *metav1.Time `json:"lastProgressTime,omitempty"`
	// Conditions has Complete.
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// Standstill is the time in which no pod could use a volume.
type Standstill struct {
	// Since is when the last pod had given the volume up.
	Since metav1.Time `json:"since"`
	// Seconds is how long it was until pods could start on the target. It is not set before.
	// +optional
	Seconds *int64 `json:"seconds,omitempty"`
}

// Ended reports whether nothing more happens.
func (m *VolumeMove) Ended() bool { return m.Status.Phase == Succeeded || m.Status.Phase == Failed }

// Underway reports whether something was begun on a node, and has not ended.
func (m *VolumeMove) Underway() bool {
	return m.Status.Phase != "" && m.Status.Phase != Pending && !m.Ended()
}
