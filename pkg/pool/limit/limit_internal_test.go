package limit

import (
	"math"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/pool/ledger"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// What is computed from the largest promise does not overflow, also for many volumes.
func TestLimitOfTheLargestPromise(t *testing.T) {
	s := Sizes{bytesPerInode: 1}
	for name, flags := range map[string]ledger.Flags{"a directory": ledger.HasRecord, "a device": ledger.HasRecord | ledger.IsBlock} {
		c := ledger.NewInfo(volume.MaxBytes, "uid", 0, flags)
		if limit := s.Limit(c); limit.Bytes < c.Promised || limit.Inodes < 0 || limit.Bytes > math.MaxInt64/100 {
			t.Errorf("%s of %d bytes has the limit %+v", name, c.Promised, limit)
		}
	}
}
