package devices

import (
	"crypto/sha256"
	"encoding/hex"
	"path/filepath"
	"regexp"
	"strings"
)

// outsideNames are runs of what names of volumes do not have.
var outsideNames = regexp.MustCompile(`[^.0-9A-Za-z]+`)

// maxName is the longest name of an object in Kubernetes (RFC 1123 subdomain), in bytes.
const maxName = 253

// VolumeName is the name of the volume for a device of a node: local-NODE-DEVICE. A hash of the node and the whole path
// makes it unique where another device, of whatever node, has the name already, and short where it would be too long.
func VolumeName(node, path string, taken func(name string) bool) string {
	plain := strings.ToLower("local-" + outsideNames.ReplaceAllString(node+"-"+filepath.Base(path), "-"))
	// A name must not end with what the replacement or the device has there, nor have an empty part.
	plain = tidy(plain)
	if len(plain) <= maxName && !taken(plain) {
		return plain
	}
	sum := sha256.Sum256([]byte(node + " " + path))
	suffix := "-" + hex.EncodeToString(sum[:5])
	if len(plain) > maxName-len(suffix) {
		plain = plain[:maxName-len(suffix)]
	}
	return strings.TrimRight(plain, "-.") + suffix
}

var emptyParts = regexp.MustCompile(`[-.]*\.[-.]*\.[-.]*|-\.|\.-`)

// tidy makes a name valid that has parts which begin or end with a dash, or are empty. Names that are valid stay.
func tidy(name string) string {
	return strings.TrimRight(emptyParts.ReplaceAllString(name, "-"), "-.")
}
