package provisioner

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"path"
	"regexp"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"kubevirt.io/hostpath-provisioner/pkg/provisioner/origin"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// CSIDirectory is where the upstream operator puts the pool of the CSI driver inside this one. It is never a volume.
const CSIDirectory = "csi"

// maxName is the longest directory name, in bytes: what volume.ParseID takes.
const maxName = 200

// directory names the directory of a new PersistentVolume, by what a person can read in a listing.
func (c Config) directory(claim *corev1.PersistentVolumeClaim, pv string) (volume.ID, error) {
	switch {
	case c.Mode == SingleNode:
		return volume.ParseID(joinName(claim.Namespace+"-"+claim.Name, pv))
	case c.NamePrefix:
		return volume.ParseID(joinName(claim.Name, pv))
	}
	return volume.ParseID(pv)
}

// joinName is <prefix>-<pv>. Of a prefix that would make it too long for a file name, a hash of the whole takes the
// place of the end.
func joinName(prefix, pv string) string {
	if name := prefix + "-" + pv; len(name) <= maxName {
		return name
	}
	sum := sha256.Sum256([]byte(prefix))
	hash := "-" + hex.EncodeToString(sum[:6])
	return prefix[:maxName-len(hash)-1-len(pv)] + hash + "-" + pv
}

// pvName is how both provisioners, these and the upstream ones, name a PersistentVolume: by the uid of its first claim.
var pvName = regexp.MustCompile(`^pvc-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

// ownDirectory is the directory of a PersistentVolume that these provisioners made, and its volume. The name ends with that
// of the PersistentVolume, which has a fixed form and is never given twice: so no other one's directory has the name. The
// upstream provisioners made longer names than volumes have: of such a directory the volume has the PersistentVolume's name.
func (c Config) ownDirectory(pv *corev1.PersistentVolume) (directory string, id volume.ID, err error) {
	refuse := func(format string, args ...any) (string, volume.ID, error) {
		return "", volume.ID{}, fmt.Errorf(format, args...)
	}
	if pv.Spec.HostPath == nil {
		return refuse("it is not a hostPath volume: correct its annotation %s", origin.ProvisionedBy)
	}
	at := pv.Spec.HostPath.Path
	if !path.IsAbs(at) || path.Clean(at) != at || path.Dir(at) != c.Path {
		return refuse("path %q is not a directory in %s", at, c.Path)
	}
	directory = path.Base(at)
	if directory == CSIDirectory {
		return refuse("path %q is the pool of the CSI driver", at)
	}
	prefix, named := strings.CutSuffix(directory, "-"+pv.Name)
	if !pvName.MatchString(pv.Name) || directory != pv.Name && !named {
		return refuse("directory %s does not have the name of a directory of PersistentVolume %s", directory, pv.Name)
	}
	if len(directory) > maxName && validation.IsDNS1123Subdomain(prefix) == nil {
		id, err = volume.ParseID(pv.Name)
		return directory, id, err
	}
	if id, err = volume.ParseID(directory); err != nil {
		return refuse("path %q does not have the name of a volume: %w", at, err)
	}
	return directory, id, nil
}
