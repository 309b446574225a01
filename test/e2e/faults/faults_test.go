// Package faults tests what the driver does when a pool's filesystem does not do what it
// should: it is full, read-only or not mounted, its disk fails or hangs. The driver is
// the real program and the filesystems are real ones. Every call is made during every
// fault, and what it is answered is written down here; afterwards all that was
// acknowledged has to be there, once, and nothing else.
package faults

import (
	"testing"

	"kubevirt.io/hostpath-provisioner/test/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

const (
	kib = 1 << 10
	mib = 1 << 20
)

// unlessShort is for tests that wait for most of a minute.
func unlessShort(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("this takes long: make test-faults has it")
	}
}

// A filesystem is one that pools are on.
type filesystem struct {
	kind     string
	bytes    int64
	mkfs     []string
	options  []string
	enforced bool // its quotas are on
}

// someFilesystems are the first few where time is short, which may be more in the guest, where
// XFS and ext4 have quotas.
func someFilesystems(few, inGuest int) []filesystem {
	switch all := filesystems(); {
	case !testing.Short():
		return all
	case testenv.Guest():
		return all[:inGuest]
	default:
		return all[:few]
	}
}

// filesystems are those that this kernel has, with their quotas if it has them.
func filesystems() []filesystem {
	// What ext4 has left to do after mkfs.ext4 it would do meanwhile.
	const eager = "lazy_itable_init=0,lazy_journal_init=0"
	if testenv.Guest() {
		quota := []string{"prjquota"}
		return []filesystem{
			{kind: "xfs", bytes: 320 * mib, options: quota, enforced: true},
			{kind: "ext4", bytes: 256 * mib, mkfs: []string{"-O", "quota,project", "-E", "quotatype=prjquota," + eager}, options: quota, enforced: true},
		}
	}
	return []filesystem{
		{kind: "xfs", bytes: 320 * mib},
		{kind: "ext4", bytes: 256 * mib, mkfs: []string{"-E", eager}},
		{kind: "btrfs", bytes: 256 * mib, enforced: true},
	}
}
