// hello is a program to build.
package main

import "fmt"

func main() { fmt.Println("hello") }
