"""Templates of the built-in prompts: word problems and small Python tasks (the chat templates are in topics.py).

A template names its blanks: `{small}`, `{medium}`, `{large}` and `{price}` are numbers, every other blank is a word from
the pool of that name; a digit after the name makes another blank of the same pool (`{small2}`). Training and evaluation
have separate templates, separate numbers and separate tasks; names, things and places are shared.
"""

from __future__ import annotations

NUMBERS = {"small": (2, 14), "medium": (15, 60), "large": (61, 480), "price": (2, 40)}


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.strip().splitlines())


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(","))


WORDS = {
    "name": _words(
        "Amara, Ben, Carlos, Divya, Elena, Farid, Grace, Hiro, Ines, Jamal, Kofi, Lena, Mateo, Nadia, Omar, Priya, "
        "Quinn, Rosa, Samir, Tara, Uma, Viktor, Wei, Yusuf, Zoe, Anton, Bianca, Chloe, Dmitri, Esther, Felix, Hana"
    ),
    "thing": _words(
        "apples, notebooks, marbles, stickers, eggs, pencils, seashells, cupcakes, postcards, oranges, beads, candles, "
        "tickets, muffins, buttons, puzzles, balloons, magazines, roses, cookies, lemons, batteries, stamps, peaches"
    ),
    "container": _words("boxes, bags, baskets, jars, crates, shelves, trays, drawers, cartons, buckets"),
    "place": _words("the market, the library, the school fair, a bakery, the town festival, a garden shop, the office"),
    "vehicle": _words("train, bus, delivery van, cyclist, ferry, truck, car, school bus"),
    "job": _words(
        "painting fences, mowing lawns, walking dogs, washing cars, tutoring, babysitting, delivering papers"
    ),
    "animal": _words("cows, goats, chickens, ducks, sheep, horses, rabbits, geese"),
    "goal": _words(
        "a bicycle, a guitar, a camera, a telescope, a tent, a pair of skates, a sewing machine, a drum set"
    ),
    "data": _words(
        "numbers, temperatures, prices, ages, test scores, distances, rainfall amounts, heights, weights, durations"
    ),
    "text": _words("sentence, file name, email address, paragraph, password, book title, line of text, phone number"),
    "record": _words("students, books, products, employees, songs, recipes, cities, movies, orders, players"),
}

MATHS = {
    "train": _lines(
        """
        {name} has {medium} {thing} and buys {small} more packs with {small2} {thing} in each pack. How many {thing} does {name} have now?
        {name} fills {small} {container} with {medium} {thing} each. If {medium2} {thing} are left over, how many {thing} were there at the start?
        A {vehicle} travels at {medium} kilometers per hour for {small} hours and then at {medium2} kilometers per hour for {small2} hours. How far does it travel in total?
        {name} earns {price} dollars an hour {job} and works {small} hours a day for {small2} days. How much money does {name} earn?
        At {place}, {name} sells {medium} {thing} for {price} dollars each and pays {large} dollars for supplies. What is the profit?
        {name} wants to buy {goal} that costs {large} dollars. If {name} saves {price} dollars every week, how many weeks will it take?
        A farmer has {medium} {animal} and {medium2} {animal2}. Each animal eats {small} kilograms of feed a day. How much feed is needed for {small2} days?
        {name} reads {small} pages every morning and {medium} pages every evening. How many pages does {name} read in {small2} days?
        A rectangular garden is {medium} meters long and {small} meters wide. What are its perimeter and its area?
        {name} shares {large} {thing} equally among {small} friends. How many {thing} does each friend get, and how many are left?
        {name} is {small} years older than {name2}. Together they are {medium} years old. How old is each of them?
        A shop gives a discount of {medium} percent on a coat that costs {large} dollars. What is the new price?
        {name} buys {small} {thing} for {price} dollars each and {small2} {thing2} for {price2} dollars each. How much change does {name} get from {large} dollars?
        A water tank holds {large} liters. A pump adds {small} liters every minute, and a leak removes 1 liter every minute. How long does it take to fill the empty tank?
        {name} runs {small} kilometers on Monday and twice as far on Tuesday. On Wednesday {name} runs {small2} kilometers. What is the total distance?
        There are {large} seats in a theater. On Friday {medium} seats are empty, and on Saturday {medium2} seats are empty. How many tickets were sold on both days?
        A recipe for {small} people needs {medium} grams of flour per person. {name} cooks for {small2} more people. How many grams of flour are needed?
        {name} plants {small} rows of {medium} tulips, but rabbits eat {medium2} of them. How many tulips remain?
        A box of {thing} costs {price} dollars and holds {medium} pieces. What do {small} boxes cost, and how many pieces are in them?
        {name} spends {small} minutes on each of {medium} math questions and then checks the work for {medium2} minutes. How many minutes is that altogether?
        In a class of {medium} children, {small} are absent. The others form teams of {small2}. How many full teams are there?
        The sum of two numbers is {large}. One number is {medium}. What is the other number, and what is the difference between the two?
        {name} drinks {small} glasses of water a day, and each glass holds {large} milliliters. How many milliliters does {name} drink in a week?
        A library has {large} books. It lends {medium} books on Monday and gets {small} books back on Tuesday. How many books are in the library now?
        """
    ),
    "eval": _lines(
        """
        {name} bakes {small} batches of {medium} muffins and gives {medium2} of them to the neighbors. How many muffins does {name} keep?
        A parking garage has {small} floors with {medium} spaces on each floor. If {large} cars are parked, how many spaces are free?
        {name} walks {small} kilometers to {place} and back again, {small2} times a week. How many kilometers is that in a week?
        A phone plan costs {price} dollars a month plus {small} dollars for every extra gigabyte. {name} uses {small2} extra gigabytes. What is the bill?
        {name} collected {large} {thing} in spring, {medium} in summer and {small} in autumn. How many {thing} is that in total?
        {name} cuts a rope of {large} centimeters into {small} equal pieces. How long is each piece?
        """
    ),
}

MATHS_ENDINGS = {
    "train": _lines(
        """
        Explain step by step.
        Show your work.
        Please explain how you get the answer.
        Solve it step by step.
        Write down each step of the solution.
        Explain your reasoning in a few sentences.
        """
    ),
    "eval": _lines(
        """
        Think about it one step at a time and explain.
        Describe how you solve this.
        """
    ),
}

CODE_FRAMES = {
    "train": _lines(
        """
        Write a Python function that {task}. Explain how it works.
        Please write a short Python function that {task}, and show an example call.
        How can I write a Python function that {task}?
        I am learning Python. Show me a function that {task}.
        Create a Python function with a docstring that {task}.
        Write Python code for a function that {task}. Add comments.
        Can you help me with a Python function that {task}? Describe each step.
        """
    ),
    "eval": _lines(
        """
        Give me a Python function that {task}, with a short explanation.
        What would a simple Python function look like that {task}?
        I need a small Python helper that {task}. Please write it and say what it does.
        """
    ),
}

CODE_TASKS = {
    "train": _lines(
        """
        returns the average of a list of {data}
        returns the largest value in a list of {data}
        returns the smallest value in a list of {data}
        counts how many {data} in a list are greater than {medium}
        removes all {data} below {small} from a list
        sorts a list of {data} from high to low
        returns the median of a list of {data}
        finds the difference between the largest and smallest {data}
        doubles every value in a list of {data}
        returns the positions of all {data} that are equal to {medium}
        adds up only the even values in a list of {data}
        splits a list of {data} into groups of {small}
        rounds a list of {data} to {small} decimal places
        merges two sorted lists of {data}
        removes duplicates from a list of {data} and keeps the order
        returns the last {small} values of a list of {data}
        computes the running total of a list of {data}
        checks whether a list of {data} is sorted
        counts the vowels in a {text}
        reverses a {text}
        checks whether a {text} reads the same forwards and backwards
        counts the words in a {text}
        replaces spaces with underscores in a {text}
        returns the longest word in a {text}
        removes punctuation from a {text}
        counts how often each character appears in a {text}
        checks whether a {text} has more than {medium} characters
        capitalizes the first letter of each word in a {text}
        removes all digits from a {text}
        shortens a {text} to {medium} characters
        finds the first repeated character in a {text}
        checks whether a {text} contains only letters
        groups a list of {record} by their first letter
        sorts a list of {record} by name
        counts the {record} in a dictionary
        finds the most common name in a list of {record}
        merges two dictionaries of {record}
        filters a list of {record} by a keyword
        prints a numbered list of {record}
        saves a list of {record} to a text file
        reads a list of {record} from a CSV file
        picks {small} random {record} from a list
        converts a list of {record} into a dictionary with numbers as keys
        checks whether two lists of {record} have anything in common
        computes the factorial of {small}
        prints the multiplication table of {small}
        checks whether a number is divisible by {small}
        returns all prime numbers up to {large}
        returns the first {medium} Fibonacci numbers
        computes the greatest common divisor of two numbers
        converts {large} minutes into hours and minutes
        converts a temperature from Celsius to Fahrenheit
        adds all the digits of a number such as {large}
        raises a number to the power of {small} without using the ** operator
        checks whether a year is a leap year
        computes the area of a circle with radius {small}
        simulates {medium} rolls of a die and counts each result
        converts a decimal number such as {medium} to binary
        counts down from {medium} to zero
        returns the sum of all multiples of {small} below {large}
        asks the user to guess a number between 1 and {large}
        computes a tip of {medium} percent for a restaurant bill
        transposes a matrix with {small} rows
        flattens a list of lists of {data}
        swaps the first and last {data} in a list
        """
    ),
    "eval": _lines(
        """
        returns the second largest value in a list of {data}
        counts the {data} in a list that lie between {small} and {medium}
        moves all zeros to the end of a list of {data}
        returns every second character of a {text}
        counts the uppercase letters in a {text}
        checks whether two words are anagrams of each other
        finds the shortest name in a list of {record}
        removes all {record} that start with a given letter
        returns all divisors of {large}
        computes the perimeter of a rectangle that is {small} units wide
        converts {medium} kilometers to miles
        multiplies all the numbers from 1 to {small} that are odd
        """
    ),
}
