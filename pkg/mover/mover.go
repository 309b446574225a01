// Package mover moves a volume from this node to another, or from another to this, by the drivers of the two nodes. Out is the side
// that has the volume: it copies while pods go on, has its driver fence the volume, waits until no pod has it, copies what has
// changed since, and hands the volume over. In is the other side. Each may be killed at any moment and run again, and so may the
// drivers. What a step does on disk is in pkg/pool, and how a tree is copied in pkg/hostfs/transfer; who stops the pods, confirms
// the copy and removes the source is decided elsewhere.
//
// The two sides talk over connections of TLS, one for each session. A session begins with a hello of the source and the answer of
// the target.
package mover

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/driver/moves"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// A Driver is that of this node. Repeat makes a call until the driver answers.
type Driver interface {
	Repeat(ctx context.Context, call string, r moves.Request) (moves.Volume, error)
}

// Open opens the content of a volume that the driver has described.
type Open func(ctx context.Context, id string, v moves.Volume) (*dir.Dir, error)

// An Event is what a mover reports.
type Event struct {
	Time  time.Time `json:"time"`
	Event string    `json:"event"`
	// Pass is the number of a pass, from 1 on; Last is the one after which the volume is handed over.
	Pass int  `json:"pass,omitempty"`
	Last bool `json:"last,omitempty"`
	// Based says that the pass has looked only at what differs from the reference of the one before.
	Based bool `json:"based,omitempty"`
	// Entries, Files, Bytes and Compared are what was done of a pass: looked at, sent, and compared.
	Entries  int64 `json:"entries,omitempty"`
	Files    int64 `json:"files,omitempty"`
	Bytes    int64 `json:"bytes,omitempty"`
	Compared int64 `json:"comparedBytes,omitempty"`
	// Fence is given when the volume is handed over: with it, and not before, the copy can be confirmed.
	Fence string `json:"fence,omitempty"`
	// PromisedBytes is what the volume is promised, when it is handed over.
	PromisedBytes int64  `json:"promisedBytes,omitempty"`
	Error         string `json:"error,omitempty"`
}

// The events. One of each process is the last: HandedOver, Ended or Failed.
const (
	Listening  = "listening"   // the target waits for the source
	Preparing  = "preparing"   // the target has its copy made
	Passed     = "passed"      // a pass has ended
	Passing    = "passing"     // a pass goes on
	Copied     = "copied"      // the source waits for leave to be fenced
	Fenced     = "fenced"      // the source is not published any more
	Waiting    = "waiting"     // for the source to be unpublished
	Unused     = "unused"      // the source is published nowhere
	Unbased    = "unbased"     // what a reference was made for has failed, and is done without
	Received   = "received"    // the copy is whole
	HandedOver = "handed-over" // the copy can be confirmed
	Refused    = "refused"     // the target has not served a connection
	Ended      = "ended"       // the step was done
	Failed     = "failed"
)

// The kinds of sessions.
const (
	sessionPass     = "pass"     // passes follow
	sessionReceived = "received" // the copy is whole
	sessionEnd      = "end"      // the source is handed over
	sessionVouch    = "vouch"    // the copy is the volume
	sessionUndone   = "undone"   // the source is the volume, and the copy goes
)

// A hello begins a session.
type hello struct {
	Version int    `json:"version"`
	Kind    string `json:"kind"`
	Volume  string `json:"volume"`
	Move    string `json:"move"`
	// Shape is that of the source.
	moves.Shape
	// Base is the reference of the source that the copy equals when the session has ended, and Verify the way in which the two are
	// compared; empty for none.
	Base   string `json:"base,omitempty"`
	Verify string `json:"verify,omitempty"`
	// UID is that of the copy which is whole, Filled what the target has called the session that made it so, and Fence what it is whole
	// as of.
	UID    string `json:"uid,omitempty"`
	Filled string `json:"filled,omitempty"`
	Fence  string `json:"fence,omitempty"`
}

// An answer is that to a hello.
type answer struct {
	// UID is that of the copy, and Base the reference of the source that it has equalled so far, by the comparison Verify.
	UID    string `json:"uid,omitempty"`
	Base   string `json:"base,omitempty"`
	Verify string `json:"verify,omitempty"`
	// Filled is what the target calls the session from now on.
	Filled string `json:"filled,omitempty"`
	Error  string `json:"error,omitempty"`
}

const (
	// sessions is the version of what is said in them.
	sessions = 1
	// mostMessage is how long a message may be, in bytes.
	mostMessage = 16 << 10
	// answerWithin is how long the peer may take to say something that it has at hand.
	answerWithin = 30 * time.Second
)

// send sends a message.
func send(conn net.Conn, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if len(data) > mostMessage {
		return fmt.Errorf("a message of %d bytes is too long", len(data))
	}
	if err := conn.SetWriteDeadline(time.Now().Add(answerWithin)); err != nil {
		return err
	}
	_, err = conn.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(data))), data...))
	return errors.Join(err, conn.SetWriteDeadline(time.Time{}))
}

// receive reads a message, which has to come within a time; 0 for any.
func receive(conn net.Conn, within time.Duration, v any) error {
	if within > 0 {
		if err := conn.SetReadDeadline(time.Now().Add(within)); err != nil {
			return err
		}
	}
	var head [4]byte
	if _, err := io.ReadFull(conn, head[:]); err != nil {
		return err
	}
	length := binary.BigEndian.Uint32(head[:])
	if length > mostMessage {
		return fmt.Errorf("the peer sends a message of %d bytes, at most %d are allowed", length, mostMessage)
	}
	data := make([]byte, length)
	if _, err := io.ReadFull(conn, data); err != nil {
		return err
	}
	if err := json.Unmarshal(data, v); err != nil {
		return fmt.Errorf("read a message of the peer: %w", err)
	}
	return conn.SetReadDeadline(time.Time{})
}
