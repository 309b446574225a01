package render

import (
	"errors"
	"fmt"
)

// A Spot is a pool on a node. What is for all nodes of a pool has no node.
type Spot struct{ Pool, Node string }

// spots are the pools with a template on each node, without those whose names are of another one: pool a on node b-c and pool a-b on
// node c would have the same claim. Of several the one that is there keeps the name, or else the first has it. The error names the others.
func (r *Renderer) spots() (found map[Spot]bool, clashes error) {
	found = map[Spot]bool{}
	owners := map[string]Spot{}
	r.eachSpot(func(_ Spot, names map[string]Spot) {
		for name, own := range names {
			if _, taken := owners[name]; !taken || r.facts.Mounters[name] == own {
				owners[name] = own
			}
		}
	})
	var problems []error
	r.eachSpot(func(at Spot, names map[string]Spot) {
		for name, own := range names {
			of, has := r.facts.ClaimPools[name]
			if owners[name] != own || has && of != at.Pool {
				problems = append(problems, fmt.Errorf("pool %s on node %s: %s, the name of what it needs there, is that of pool %s: give the pool another name",
					at.Pool, at.Node, name, otherOf(owners[name], own, of)))
				return
			}
		}
		found[at] = true
	})
	return found, errors.Join(problems...)
}

// eachSpot goes through the pools with a template on each node, with the names that they need there and what these are for.
func (r *Renderer) eachSpot(do func(at Spot, names map[string]Spot)) {
	for i := range r.pools {
		pool := &r.pools[i]
		if pool.PVCTemplate == nil {
			continue
		}
		for _, node := range r.facts.Nodes {
			at := Spot{pool.Name, node}
			names := map[string]Spot{MounterName(pool.Name, node): at}
			if pool.IsShared() {
				names[claimName(pool, node)] = Spot{Pool: pool.Name}
			}
			do(at, names)
		}
	}
}

func otherOf(owner, own Spot, claimed string) string {
	switch {
	case owner == own:
		return claimed
	case owner.Node == "":
		return owner.Pool
	}
	return owner.Pool + " on node " + owner.Node
}

// Clashes are pools on nodes that have nothing there, because its name is that of something else.
func (r *Renderer) Clashes() error {
	_, err := r.spots()
	return err
}
