package kubectl

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// A storageProfile is what the Containerized Data Importer (CDI) makes disks of virtual machines by: the spec is an administrator's,
// and the status what CDI does.
type storageProfile struct {
	metav1.ObjectMeta `json:"metadata"`
	Spec              profile `json:"spec"`
	Status            profile `json:"status"`
}

type profile struct {
	Claims []struct {
		AccessModes []corev1.PersistentVolumeAccessMode `json:"accessModes"`
		VolumeMode  corev1.PersistentVolumeMode         `json:"volumeMode"`
	} `json:"claimPropertySets"`
	CloneStrategy string `json:"cloneStrategy"`
	SourceFormat  string `json:"dataImportCronSourceFormat"`
}

// profilePatch is that of docs/kubevirt.md, with what is to be for snapshots.
const (
	profilePatch = `kubectl patch storageprofile %s --type=merge -p ` +
		`'{"spec":{"claimPropertySets":[{"accessModes":["ReadWriteOnce"],"volumeMode":"Block"},{"accessModes":["ReadWriteOnce"],"volumeMode":"Filesystem"}],"cloneStrategy":"csi-clone"%s}}'`
	imagesAsSnapshots = `,"dataImportCronSourceFormat":"snapshot"`
)

// MachineChecks are whether CDI makes disks that the driver can make.
type machineChecks struct {
	driver   driverPods
	kinds    kinds
	classes  []storagev1.StorageClass
	profiles []storageProfile
}

// virtualMachines are checked where CDI makes their disks.
func (c machineChecks) virtualMachines() (string, []Finding) {
	if !c.kinds.has(storageProfiles) {
		return "CDI, which makes their disks, is not installed", nil
	}
	var problems []Finding
	for _, s := range c.classes {
		if s.Provisioner != driverName {
			continue
		}
		at := slices.IndexFunc(c.profiles, func(p storageProfile) bool { return p.Name == s.Name })
		if at < 0 {
			problems = append(problems, Finding{Problem: "CDI has no StorageProfile for " + s.Name, Mend: "See the log of its deployment cdi-deployment"})
			continue
		}
		problems = append(problems, c.wrongProfile(s, c.profiles[at])...)
	}
	return "CDI has profiles for these classes that fit", problems
}

// wrongProfile is what a profile has that the driver cannot do, or that CDI has guessed.
func (c machineChecks) wrongProfile(s storagev1.StorageClass, p storageProfile) (problems []Finding) {
	note := func(mend, format string, values ...any) {
		problems = append(problems, Finding{Problem: "the StorageProfile " + s.Name + " " + fmt.Sprintf(format, values...), Mend: mend + ": docs/kubevirt.md#storageprofile"})
	}
	shared := slices.ContainsFunc(c.driver.reported(), func(n Node) bool {
		return slices.ContainsFunc(n.Report.Pools, func(p Pool) bool { return p.Shared && p.Name == poolOf(s) })
	})
	switch {
	case len(p.Spec.Claims) == 0 && shared:
		note("Name ReadWriteMany with Filesystem", "is left to CDI, with which no virtual machine of this shared pool migrates")
	case len(p.Spec.Claims) == 0:
		images := ""
		if c.driver.makesSnapshots() {
			images = imagesAsSnapshots
		}
		note(fmt.Sprintf(profilePatch, s.Name, images), "is left to CDI, which makes disks as %s and clones by %s", p.Status.modes(), p.Status.clones())
	}
	strategy, format := p.Status.CloneStrategy, p.Status.SourceFormat
	switch {
	case shared && (strategy == "csi-clone" || strategy == "snapshot" || format == "snapshot"):
		note(`Set "copy" and "pvc"`, "asks for clones or snapshots, which shared pools do not have")
	case !c.driver.makesSnapshots() && (strategy == "snapshot" || format == "snapshot"):
		note("Install snapshots, or set another", "asks for snapshots, which are not installed")
	}
	return problems
}

func (p profile) modes() string {
	var all []string
	for _, c := range p.Claims {
		all = append(all, string(c.VolumeMode))
	}
	if len(all) == 0 {
		return "nothing"
	}
	return strings.Join(all, " or ")
}

func (p profile) clones() string {
	if p.CloneStrategy == "" {
		return "copy"
	}
	return p.CloneStrategy
}
