package kubectl

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"kubevirt.io/hostpath-provisioner/api/v1alpha1"
)

// MovedHeadings are those of the table of moves.
var MovedHeadings = []string{"NAMESPACE", "CLAIM", "FROM", "TO", "PHASE", "STANDSTILL", "MESSAGE"}

// A Moved is what became of a move.
type Moved struct {
	Namespace string `json:"namespace"`
	Claim     string `json:"claim"`
	// Move is the name of the VolumeMove; empty if none was made.
	Move  string         `json:"move,omitempty"`
	From  string         `json:"from,omitempty"`
	To    string         `json:"to,omitempty"`
	Phase v1alpha1.Phase `json:"phase,omitempty"`
	// StandstillSeconds is how long no pod could use the volume.
	StandstillSeconds *int64 `json:"standstillSeconds"`
	Message           string `json:"message"`
	// BytesSent and BytesToGo are those of the VolumeMove.
	BytesSent int64  `json:"bytesSent"`
	BytesToGo *int64 `json:"bytesToGo"`

	uid   types.UID
	group int // of the plan
	ended bool
	// waits is in how many looks, one after the other, it had not begun, or waited for other volumes of its pods.
	waits int
	// left says that it is not waited for any more. Its VolumeMove stays.
	left bool
	// refused is how often the VolumeMove could not be made.
	refused int
}

func (m Moved) cells() []string {
	standstill := ""
	if m.StandstillSeconds != nil {
		standstill = strconv.FormatInt(*m.StandstillSeconds, 10) + " s"
	}
	return []string{m.Namespace, m.Claim, m.From, m.To, string(m.Phase), standstill, m.Message}
}

// Done reports whether the volume was moved.
func (m Moved) Done() bool { return m.Phase == v1alpha1.Succeeded }

// Progress of all moves together. Bytes that are not known yet do not count.
type Progress struct {
	Moved, Failed, Of    int
	BytesSent, BytesToGo int64
	// Each is what the moves do that have begun and not ended.
	Each []Moved
	// Problem is why nothing was learned or made now, which is tried again; empty for nothing.
	Problem string
}

const (
	// mostFailures are how many looks in a row may fail after the first one, and mostRefusals how often a VolumeMove may not be made.
	mostFailures = 30
	mostRefusals = 3
	// within is how long the API server may take, if nothing else is said.
	within = 30 * time.Second
	// fewLooks are those after which a move that waits lets others go first, and manyLooks those without one that goes on after which those that wait
	// are left to the operator.
	// In these five minutes the operator may count what an earlier move has brought to a node twice, for three.
	fewLooks  = 5
	manyLooks = 150
)

// Moves has the operator move the volumes of claims, so many at once. It goes on with VolumeMoves that are there: after an
// interruption it can be called again. It asks how far they are at each interval, and tells progress. After the first, a call that fails is made
// again.
func Moves(ctx context.Context, k Kubectl, plan []Planned, atOnce int, every time.Duration, o MoveOptions, progress func(Progress)) ([]Moved, error) {
	moves := make([]Moved, len(plan))
	for i, p := range plan {
		moves[i] = Moved{Namespace: p.Namespace, Claim: p.Claim, From: p.From, To: o.Target, uid: p.move, group: p.group}
	}
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	most := 0 // before the first look has succeeded
	for failures, still := 0, 0; ; {
		err := k.look(ctx, moves, o)
		if err == nil {
			failures, most = 0, mostFailures
			still = leave(moves, still)
			err = k.begin(ctx, moves, atOnce, o)
		} else if failures++; failures > most && ctx.Err() == nil {
			return moves, err
		}
		now := progressOf(moves)
		if err != nil && ctx.Err() == nil {
			now.Problem = err.Error()
		}
		progress(now)
		if now.Moved+now.Failed == now.Of {
			return moves, nil
		}
		select {
		case <-ctx.Done():
			return moves, fmt.Errorf("%w: the moves that have begun go on, and the same command shows them again", context.Cause(ctx))
		case <-ticker.C:
		}
	}
}

// look reads how far the moves are.
func (k Kubectl) look(ctx context.Context, moves []Moved, o MoveOptions) error {
	ctx, cancel := k.inTime(ctx)
	defer cancel()
	all, err := volumeMoves(ctx, k)
	if err != nil {
		return err
	}
	for i := range moves {
		if m := &moves[i]; !m.ended {
			m.find(all, o)
		}
	}
	return nil
}

// find notes how far the VolumeMove is, or one that goes on for the claim. What asks for something else before it has begun keeps it from being made:
// the operator would begin that first.
func (m *Moved) find(all []v1alpha1.VolumeMove, o MoveOptions) {
	other := ""
	for i := range all {
		of := &all[i]
		switch {
		case of.Namespace != m.Namespace || of.Spec.ClaimName != m.Claim:
		case m.uid == of.UID, m.uid == "" && m.takesUp(of) && (of.Underway() || of.Spec == m.spec(o)):
			m.note(of)
			return
		case m.takesUp(of):
			other = of.Name
		}
	}
	switch {
	case m.uid != "":
		m.ended, m.Message = true, "the VolumeMove "+m.Move+" was deleted"
	case other != "":
		m.ended, m.Message = true, fmt.Sprintf("the VolumeMove %s of the claim has not begun, and asks for something else: delete it, and try again", other)
	}
}

// volumeMoves are those of all namespaces.
func volumeMoves(ctx context.Context, k Kubectl) (all []v1alpha1.VolumeMove, err error) {
	if err := get(ctx, k, &all, "volumemoves.hostpathprovisioner.kubevirt.io"); err != nil {
		return nil, fmt.Errorf("%w: moving needs the operator (docs/moves.md)", err)
	}
	return all, nil
}

var errSilent = errors.New("the API server has not answered")

func (k Kubectl) inTime(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, cmp.Or(k.Within, within), errSilent)
}

// takesUp says that a VolumeMove goes on which takes the volume away: one that has brought it to where it is may have the old copy to remove still.
func (m *Moved) takesUp(of *v1alpha1.VolumeMove) bool {
	return (of.Underway() || !of.Ended() && of.DeletionTimestamp == nil) && (m.From == "" || of.Status.TargetNode != m.From)
}

func (m *Moved) note(of *v1alpha1.VolumeMove) {
	m.uid, m.Move, m.ended = of.UID, of.Name, of.Ended()
	m.From, m.To = cmp.Or(of.Status.SourceNode, m.From), cmp.Or(of.Status.TargetNode, of.Spec.TargetNode)
	m.Phase, m.BytesSent, m.BytesToGo = cmp.Or(of.Status.Phase, v1alpha1.Pending), of.Status.BytesSent, of.Status.BytesToGo
	if of.Status.Standstill != nil {
		m.StandstillSeconds = of.Status.Standstill.Seconds
	}
	m.Message = "the operator has not seen it yet"
	if c := meta.FindStatusCondition(of.Status.Conditions, v1alpha1.ConditionComplete); c != nil {
		m.Message = c.Message
	}
	if m.waits++; m.Phase != v1alpha1.Pending && !of.Status.Copied {
		m.waits = 0
	}
}

// made says that its VolumeMove is made, and has not ended.
func (m Moved) made() bool { return m.uid != "" && !m.ended }

// leave counts the looks in a row in which no move goes on, and after many leaves those that wait to the operator: others may go, and there is an end.
// It is told how many there were before. One that goes on after all is waited for again, with those of its group.
func leave(moves []Moved, before int) (still int) {
	waited := false
	still = before + 1
	for _, m := range moves {
		if m.made() && !m.left {
			still, waited = min(still, m.waits), true
		}
	}
	if !waited {
		still = 0
	}
	goesOn := map[int]bool{}
	for _, m := range moves {
		if m.group > 0 && m.made() && m.waits == 0 {
			goesOn[m.group] = true
		}
	}
	for i := range moves {
		m := &moves[i]
		m.left = m.made() && m.waits > 0 && !goesOn[m.group] && (m.left || still == manyLooks)
		if m.left {
			m.Message = fmt.Sprintf("the VolumeMove %s stays, and goes on by itself when it can: %s", m.Move, m.Message)
		}
	}
	return still % manyLooks
}

// begin makes VolumeMoves for the next claims. One that is refused again and again holds up no other.
func (k Kubectl) begin(ctx context.Context, moves []Moved, atOnce int, o MoveOptions) error {
	for m := next(moves, atOnce); m != nil; m = next(moves, atOnce) {
		if err := k.create(ctx, m, o); err != nil {
			if ctx.Err() == nil {
				m.refused++
				m.Message, m.ended = fmt.Sprintf("make a VolumeMove: %v", err), m.refused == mostRefusals
			}
			return fmt.Errorf("make a VolumeMove for claim %s/%s: %w", m.Namespace, m.Claim, err)
		}
	}
	return nil
}

// next is the next move to make, if it is time for one. One that waits lets others go first, but all that wait may begin together: no more than
// twice as many as at once are made. Those of a group wait for each other, and are made together.
func next(moves []Moved, atOnce int) *Moved {
	running, made, begun := 0, 0, map[int]bool{}
	for _, m := range moves {
		if !m.made() {
			continue
		}
		if begun[m.group] = m.group > 0; m.left {
			continue
		}
		if made++; m.waits <= fewLooks {
			running++
		}
	}
	unmade := func(m Moved) bool { return m.uid == "" && !m.ended }
	i := slices.IndexFunc(moves, func(m Moved) bool { return unmade(m) && begun[m.group] })
	if i < 0 && running < atOnce && made < 2*atOnce {
		i = slices.IndexFunc(moves, unmade)
	}
	if i < 0 {
		return nil
	}
	return &moves[i]
}

// spec is what is asked for.
func (m *Moved) spec(o MoveOptions) v1alpha1.VolumeMoveSpec {
	spec := v1alpha1.VolumeMoveSpec{
		ClaimName: m.Claim, TargetNode: o.Target, Snapshots: v1alpha1.RefuseSnapshots, When: v1alpha1.WhenUnpublished, Verify: v1alpha1.VerifyAll,
		Force: o.Force, BytesPerSecond: o.BytesPerSecond,
	}
	if o.LeaveSnapshots {
		spec.Snapshots = v1alpha1.LeaveSnapshots
	}
	if o.Evict {
		spec.When = v1alpha1.WhenEvict
	}
	return spec
}

func (k Kubectl) create(ctx context.Context, m *Moved, o MoveOptions) error {
	object := v1alpha1.VolumeMove{
		TypeMeta:   metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(), Kind: v1alpha1.Kind},
		ObjectMeta: metav1.ObjectMeta{Namespace: m.Namespace, GenerateName: m.Claim + "-"},
		Spec:       m.spec(o),
	}
	text, err := json.Marshal(object)
	if err != nil {
		return err
	}
	ctx, cancel := k.inTime(ctx)
	defer cancel()
	out, err := k.feed(ctx, bytes.NewReader(text), "create", "--filename=-", "--output=json")
	if err != nil {
		return err
	}
	var made v1alpha1.VolumeMove
	if err := json.Unmarshal(out, &made); err != nil {
		return fmt.Errorf("read what was made: %w", err)
	}
	m.note(&made)
	return nil
}

func progressOf(moves []Moved) Progress {
	p := Progress{Of: len(moves)}
	for _, m := range moves {
		switch {
		case m.Done():
			p.Moved++
		case m.ended, m.left:
			p.Failed++
		case m.uid != "":
			p.Each = append(p.Each, m)
			if m.BytesToGo != nil {
				p.BytesToGo += *m.BytesToGo
			}
		}
		p.BytesSent += m.BytesSent
	}
	return p
}
