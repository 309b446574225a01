package store

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"io/fs"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// A Server is the driver that serves a pool which is not shared, as it writes into the file
// lock at each check.
type Server struct {
	Node string `json:"node"`
	Host string `json:"host"` // its host name, which is the name of its pod
	// Since is when it began, by the clock of its node.
	Since time.Time `json:"since"`
	// Instance is of this process alone.
	Instance string `json:"instance"`
	// Beat grows with each check: it is the sign of life.
	Beat uint64 `json:"beat"`
}

func (s Server) String() string {
	if s.Instance == "" {
		return "unknown"
	}
	return fmt.Sprintf("%q on node %q, since %s", s.Host, s.Node, s.Since.Format(time.RFC3339))
}

const maxServer = 4 << 10 // bytes

// Server is the driver that served the pool last, and its sign of life, which differs as long
// as it is alive. Both are zero where it has ended well, and the driver where that was being
// written.
func (n Nodes) Server() (by Server, sign string, err error) {
	data, err := n.store.own.ReadFile(lockName, maxServer)
	// After a loss of power a filesystem may have the length of what was not synced, and zeroes.
	data = bytes.TrimRight(data, "\x00")
	if err != nil || json.Unmarshal(data, &by) != nil {
		by = Server{}
	}
	return by, string(data), err
}

// WriteServer writes which driver serves the pool, or with nil that none does. It is no more than a
// sign: it is written in place, and not synced. The file is made if it is missing.
func (n Nodes) WriteServer(by *Server) error {
	if by == nil {
		return dir.Rewrite(n.store.own, lockName, nil)
	}
	data, err := json.Marshal(by)
	if err != nil {
		return err
	}
	data = append(data, '\n')
	err = dir.Rewrite(n.store.own, lockName, data)
	if errors.Is(err, fs.ErrNotExist) {
		err = n.store.own.WriteFile(lockName, data)
	}
	return err
}

// ProbeServer finds out whether WriteServer can write, and leaves what is written.
func (n Nodes) ProbeServer() error {
	err := dir.Touch(n.store.own, lockName)
	if errors.Is(err, fs.ErrNotExist) {
		err = n.store.own.WriteFile(lockName, nil)
	}
	return err
}

// ErrServed reports a pool that is not for this driver.
var ErrServed = errors.New("another driver serves it, and it is not shared")

// rootsFile and sharedFile are files in /dev that all drivers of a node see. Any process of the node can open, and lock, the
// second. It is locked too for drivers that may not open the first, their container having no such device, and for earlier
// ones, which knew of no other.
const (
	rootsFile  = "loop-control"
	sharedFile = "null"
)

// A NodeLock is a byte of a pool that the drivers of one node exclude each other by. It is for one goroutine at a time.
type NodeLock struct {
	dev           *dir.Dir
	at            int64
	roots, shared func() // give up what is locked; nil for what is not
}

// NewNodeLock takes the node's /dev and a byte, and locks nothing yet.
func NewNodeLock(dev *dir.Dir, at int64) *NodeLock { return &NodeLock{dev: dev, at: at} }

// Try locks what is not locked yet, and returns dir.ErrLocked where another driver has the byte. Without an error that one has
// it all the same is possible unless this is certain: then its sign of life says so.
func (l *NodeLock) Try() (certain bool, err error) {
	if l.roots == nil {
		if l.roots, err = dir.TryLockExisting(l.dev, rootsFile, l.at); errors.Is(err, dir.ErrLocked) {
			return false, err
		}
	}
	if l.shared == nil {
		l.shared, err = dir.TryLockExisting(l.dev, sharedFile, l.at)
	}
	return l.roots != nil && !errors.Is(err, dir.ErrLocked), nil
}

// Release gives the byte up.
func (l *NodeLock) Release() {
	for _, unlock := range []*func(){&l.shared, &l.roots} {
		if *unlock != nil {
			(*unlock)()
			*unlock = nil
		}
	}
}

// ServerByte is the byte of a pool in the files that the drivers of one node lock. Earlier ones that wait for the pool lock the byte after it.
func ServerByte(uuid string) int64 {
	h := fnv.New64a()
	_, _ = io.WriteString(h, uuid) // never fails
	return int64(h.Sum64()>>2) &^ 1
}
